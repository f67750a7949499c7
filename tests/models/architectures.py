"""Models of many kinds, tiny, each with the inputs of one forward. Plain torch and transformers."""

import torch
from torch import nn

from tests.models.experts import EXPERTS
from tests.models.families import _SIZES, FAMILIES

SMALL = _SIZES
IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def _noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def _of_family(family, **inputs):
    """Return a function of the family's model, and of inputs without labels."""
    return lambda: (family.build(), (), inputs)


def mixtral(implementation=None):
    """A Mixtral whose experts run by this implementation of transformers, or by its default, which is grouped_mm."""
    return _of_family(EXPERTS[f"Mixtral {implementation}" if implementation else "Mixtral"], input_ids=IDS)()


t5 = _of_family(FAMILIES["T5"], input_ids=IDS, decoder_input_ids=IDS[:, :5])


class ConvNet(nn.Module):
    """Every kind of convolution, batch norm and PReLU."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular")
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.PReLU()
        self.grouped = nn.Conv2d(8, 8, 3, groups=4)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.line = nn.Conv1d(4, 6, 3)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = self.up(self.grouped(self.act(self.norm(self.stem(x)))))
        return self.head(self.line(x.flatten(2)).mean(-1))


def seeded_conv_net():
    """A ConvNet, which has buffers, of the same values wherever it is made."""
    torch.manual_seed(0)
    return ConvNet()


def conv_net():
    return ConvNet(), (_noise(2, 3, 8, 8),), {}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 12)
        self.lstm = nn.LSTM(12, 10, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(20, 8, batch_first=True)
        self.cell = nn.LSTMCell(8, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, tokens):
        x = self.gru(self.lstm(self.embed(tokens))[0])[0]
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


def recurrent():
    return Recurrent(), (IDS,), {}


class Attention(nn.Module):
    """nn.MultiheadAttention as self-, cross- and separate-width attention."""

    def __init__(self):
        super().__init__()
        self.own = nn.MultiheadAttention(16, 4, batch_first=True)
        self.cross = nn.MultiheadAttention(16, 4, batch_first=True, add_bias_kv=True)
        self.wide = nn.MultiheadAttention(16, 4, kdim=6, vdim=10, batch_first=True)

    def forward(self, x, memory):
        x = x + self.own(x, x, x)[0]
        x = x + self.cross(x, memory, memory)[0]
        return x + self.wide(x, memory[..., :6], memory[..., 6:])[0]


def attention():
    return Attention(), (_noise(2, 5, 16), _noise(2, 7, 16)), {}


TRANSFORMERS = {
    "llama": _of_family(FAMILIES["Llama"], input_ids=IDS),
    "gpt2": _of_family(FAMILIES["GPT-2"], input_ids=IDS),
    "t5": t5,
    "vit": _of_family(FAMILIES["ViT"], pixel_values=_noise(2, 3, 16, 16)),
    "mixtral": mixtral,
    "mixtral_batched": lambda: mixtral("batched_mm"),
    "mamba": _of_family(FAMILIES["Mamba"], input_ids=IDS),
}
PLAIN = {f.__name__: f for f in (conv_net, recurrent, attention)}
ARCHITECTURES = {**TRANSFORMERS, **PLAIN}

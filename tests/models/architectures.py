"""Models of many kinds, tiny, each with the inputs of one forward. Plain torch and transformers."""

import torch
from torch import nn

IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _config(name, **values):
    import transformers

    return getattr(transformers, name)(**values)


def _model(name, config):
    import transformers

    return getattr(transformers, name)(config)


def llama():
    config = _config("LlamaConfig", **SMALL, intermediate_size=48, num_key_value_heads=2)
    return _model("LlamaForCausalLM", config), (), {"input_ids": IDS}


def gpt2():
    config = _config(
        "GPT2Config", vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, embd_pdrop=0, attn_pdrop=0,
        resid_pdrop=0,
    )  # fmt: skip
    return _model("GPT2LMHeadModel", config), (), {"input_ids": IDS}


def t5():
    config = _config(
        "T5Config", vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return _model("T5ForConditionalGeneration", config), (), {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}


def vit():
    config = _config(
        "ViTConfig", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16,
        patch_size=4, **NO_DROPOUT,
    )  # fmt: skip
    return _model("ViTForImageClassification", config), (), {"pixel_values": _noise(2, 3, 16, 16)}


def mixtral(implementation="grouped_mm"):
    config = _config(
        "MixtralConfig", **SMALL, intermediate_size=48, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, experts_implementation=implementation,
    )  # fmt: skip
    return _model("MixtralForCausalLM", config), (), {"input_ids": IDS}


def mixtral_batched():
    return mixtral("batched_mm")


def mamba():
    config = _config("MambaConfig", vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2, use_cache=False)
    return _model("MambaForCausalLM", config), (), {"input_ids": IDS}


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


def encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (_noise(2, 5, 16),), {}


def encoder_eval():
    model, args, kwargs = encoder()
    return model.eval(), args, kwargs


def _noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


TRANSFORMERS = {f.__name__: f for f in (
    llama, gpt2, t5, vit, mixtral, mixtral_batched, mamba
)}  # fmt: skip
PLAIN = {f.__name__: f for f in (conv_net, recurrent, attention, encoder, encoder_eval)}
ARCHITECTURES = {**TRANSFORMERS, **PLAIN}

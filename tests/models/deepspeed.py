"""The model of the checkpoints in tests/data/deepspeed. Plain torch: `make.py` there trains it under DeepSpeed."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, INNER = 11, 6, 7


class Block(nn.Module):
    """Sizes that divide by no number of ranks."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Tiny(nn.Module):
    """A tied weight, a frozen one, one of 5 elements, and buffers of two dtypes, one of which is not saved."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.blocks = nn.ModuleList([Block()])
        self.gains = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.linspace(-0.1, 0.1, WIDTH))
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens):
        self.num_forwards += 1
        x = self.embed(tokens)
        x = x + self.offset.to(x.dtype)
        x = x + self.frozen(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x) * self.gains.mean()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def build(seed=0):
    torch.manual_seed(seed)
    return Tiny().train()


def param_groups(model):
    """Two groups: matrices with weight decay, all else without and with another learning rate."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": 0.1, "lr": 1e-2},
        {"params": [p for p in trainable if p.ndim == 1], "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.99)},
    ]


def batch(index):
    """Batch number `index`: the same on every rank and in the reference."""
    return torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(500 + index))

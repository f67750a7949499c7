"""Models whose modules are computed in different precisions, and their batches. Plain torch."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH = 24, 16


class SixModules(nn.Module):
    """An embedding, a norm and four Linears with a role each; returns the next-token loss."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.scale = 1.0

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale
        x = x + self.down(F.gelu(self.up(self.query(self.norm(x)))))
        return F.cross_entropy(self.lm_head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class WithScale(SixModules):
    """The same with a 0-D parameter."""

    def __init__(self):
        super().__init__()
        del self.scale
        self.scale = nn.Parameter(torch.tensor(1.5))


class Difference(nn.Linear):
    """A Linear whose large offset is added before it is subtracted: bf16 has no digits left for the rest."""

    def __init__(self, width):
        super().__init__(width, width)
        nn.init.constant_(self.bias, 1000.0)

    def forward(self, x):
        return super().forward(x) - 1000.0


class Planted(nn.Module):
    """Three plain Linears and one that low precision ruins."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = Difference(WIDTH)
        self.third = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.third(x + self.second(F.gelu(self.first(x))))).square().mean()


class Mixers(nn.Module):
    """Modules with a vector of their own beside Linears, as the mixers of Mamba are. Has no forward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"mixer": Mixer()}) for _ in range(2))


class Mixer(nn.Module):
    """Two Linears and a vector."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.decay = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.outer(self.inner(x)) * self.decay


class Noisy(nn.Module):
    """Batch statistics, random numbers of four kinds, a 0-D parameter, and a backward that raises if asked to."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))
        self.generator = torch.Generator().manual_seed(3)
        self.raises = False

    def forward(self, x):
        self.calls = self.calls + 1
        x = x + torch.rand(x.shape, generator=self.generator)
        x = x * (1 + random.random() + np.random.random()) * self.scale
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.raises and index == 1:
                x.register_hook(_raise)
        return x.float().square().mean()


def _raise(_gradient):
    raise ValueError("asked to raise in backward")


def build(cls, seed=0):
    """Return a model in training mode, of the same weights wherever it is built."""
    torch.manual_seed(seed)
    return cls().train()


def tokens(rank, index=0, size=6):
    """Return the tokens of one rank's batch, int64 [size, 8]."""
    return torch.randint(0, VOCAB, (size, 8), generator=torch.Generator().manual_seed(100 * index + rank))


def vectors(rank, width=WIDTH):
    """Return the inputs of one rank's batch, fp32 [6, width]."""
    return torch.randn(6, width, generator=torch.Generator().manual_seed(7 + rank))

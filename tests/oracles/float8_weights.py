"""The oracle of float8 all-gathers: Linears that round their whole fp32 weight themselves. Plain torch, one process."""

import torch
from torch import nn
from torch.nn import functional as F

LARGEST = 448.0  # of float8_e4m3fn


def scale_of(weight):
    """The largest power of two at which the weight's largest magnitude is at most 448, by Python's numbers."""
    ratio = LARGEST / max(float(weight.detach().abs().max()), 1e-12)
    mantissa, exponent = torch.frexp(torch.tensor(ratio, dtype=torch.float64))
    assert 0.5 <= mantissa < 1
    return 2.0 ** (int(exponent) - 1)


def rounded(weight):
    """The fp32 weight with the values that float8 has."""
    scale = scale_of(weight)
    scaled = (weight.detach() * scale).clamp(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn).float() / scale


class _StraightThrough(torch.autograd.Function):
    """The rounded weight in place of the weight; its gradient as it is."""

    @staticmethod
    def forward(ctx, weight, value):
        return value.to(weight.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Master:
    """The fp32 weight, which a copy of the model in low precision shares."""

    def __init__(self, weight):
        self.weight = weight

    def __deepcopy__(self, memo):
        return self


class RoundedLinear(nn.Linear):
    def forward(self, x):
        weight = _StraightThrough.apply(self.weight, rounded(self.master.weight))
        return F.linear(x, weight, self.bias)


def round_linears(model, left_out=()):
    """Let all Linears of a model round their weights, but those named and those that share theirs."""
    for fqn, module in model.named_modules():
        if type(module) is nn.Linear and fqn not in left_out:
            module.__class__ = RoundedLinear
            module.master = _Master(module.weight)

"""Random ways of using one weight, several at once: never "safe" where a low-precision gather changes a bit."""

import random

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zeroamp
from tests.models.autograd_functions import BF16, CastsByHand, CastsInputs
from tests.models.parameter_uses import Uses
from tests.oracles.low_precision_gather import gathered, is_unchanged, randomise
from tests.selection import slow_but

PARTS = {
    "whole": lambda w: w,
    "upper rows": lambda w: w[:4],
    "lower rows": lambda w: w.chunk(2)[1],
    "middle rows": lambda w: w[2:6],
    "left columns": lambda w: w[:, :4],
    "right columns": lambda w: w[:, 4:],
    "diagonal": lambda w: w.diagonal().unsqueeze(0),
    "one row": lambda w: w[3].unsqueeze(0),
    "expanded row": lambda w: w[:1].expand(4, 8),
    "overlapping windows": lambda w: w.unfold(0, 4, 2)[0],
    "transposed": lambda w: w.t(),
    "reshaped": lambda w: w.view(4, 16)[:, :8],
    "transposed and copied": lambda w: w.t().contiguous(),
    "transposed and reshaped": lambda w: w.t().reshape(4, 16)[:, :8],
    "put together again": lambda w: torch.cat([w[:2], w[2:]]),
    "the same rows twice": lambda w: torch.cat([w[:2], w[:2]]),
    "stacked rows": lambda w: torch.stack([w[0], w[1]]),
    "float": lambda w: w.float(),
    "double and back": lambda w: w.double().float(),
    "bf16": lambda w: w.bfloat16(),
    "fp16": lambda w: w.half(),
    "bf16 and back": lambda w: w.bfloat16().float(),
    "its own dtype": lambda w: w.to(w.dtype),
    "detached": lambda w: w.detach(),
    "data": lambda w: w.data,
    "only its shape": lambda w: torch.zeros_like(w) + 1,
    "chosen": lambda w: torch.where(torch.ones_like(w) > 0, w, w),
}


def _linear(x, weight):
    return F.linear(x[:, : weight.shape[1]], weight).sum(1, keepdim=True)


def _in_function(apply):
    return lambda x, weight, part: apply(x[:, : part(weight).shape[1]], part(weight)).sum(1, keepdim=True)


def _checkpointed(times, use_reentrant):
    def run(x, weight, part):
        def inner(h):
            return sum(_linear(h * (1 + 0.3 * i), part(weight)) for i in range(times))

        return checkpoint(inner, x, use_reentrant=use_reentrant)

    return run


def _autocast_off(x, weight, part):
    with torch.autocast("cpu", enabled=False):
        return _linear(x.float(), part(weight).float())


def _no_grad(x, weight, part):
    with torch.no_grad():
        return _linear(x, part(weight))


PLACES = {
    "plain": lambda x, weight, part: _linear(x, part(weight)),
    "after asking": lambda x, weight, part: _linear(x.to(weight.dtype), part(weight)),
    "no_grad": _no_grad,
    "autocast off": _autocast_off,
    "cast_inputs": _in_function(CastsInputs.apply),
    "by hand": _in_function(lambda x, w: CastsByHand.apply(x, w, BF16, BF16)),
    "by hand, fp32 gradient": _in_function(lambda x, w: CastsByHand.apply(x, w, BF16, torch.float32)),
    **{f"checkpointed {n} {r}": _checkpointed(n, r) for n in (1, 2) for r in (True, False)},
}


def _program(seed):
    choose = random.Random(seed)
    terms = []
    for _ in range(choose.randint(1, 3)):
        place = choose.choice(list(PLACES)) if choose.random() < 0.6 else "plain"
        part = choose.choice(list(PARTS)) if choose.random() < 0.7 else "whole"
        terms.append((place, part, choose.uniform(0.5, 2)))

    def forward(m, x):
        h = m.lin(x)
        return sum(PLACES[place]((h if s < 1.2 else x) * s, m.w, PARTS[part]) * s for place, part, s in terms)

    return Uses(forward, trainable=choose.random() < 0.85), terms


@pytest.mark.parametrize("first", slow_but(range(0, 80, 20), 0))
def test_what_is_called_safe_is(first):
    num_safe = num_missed = 0
    for seed in range(first, first + 20):
        model, terms = _program(seed)
        randomise(model, seed)
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        found = zeroamp.discover_safe_parameters(model, (x,))
        unchanged = is_unchanged(model, gathered(model, ["w"]), (x,), {})
        assert unchanged or "w" not in found.safe, (seed, terms, found.reasons)
        assert is_unchanged(model, gathered(model, found.safe), (x,), {}), (seed, terms, found.reasons)
        num_safe += "w" in found.safe
        num_missed += unchanged and "w" not in found.safe and "never used" not in found.reasons["w"]
    assert num_safe >= 2  # the test reaches both verdicts
    assert num_missed <= 10  # copies, casts of parts, reads of the dtype, and the like: kept in fp32 for nothing

"""The observers: what they note, that they change nothing, and that one storage is never taken for another."""

import pytest
import torch
from torch.nn import functional as F

from zeroamp.hooks.observers.observed_dtypes import Observations, OpObserver

BF16 = torch.bfloat16


def seen(forward, **parameters):
    """What is noted of parameters that `forward` uses: {name: {dtype: first op}}."""
    observations = Observations()
    ops = OpObserver(observations)
    for name, parameter in parameters.items():
        ops.follow(name, parameter)
    with ops:
        forward()
    return {name: noted.get("compute", {}) for name, noted in observations.seen.items()}


def weight(dtype=BF16, *shape):
    return torch.ones(shape or (4, 4), dtype=dtype)


def test_the_op_that_consumes_a_parameter_is_noted():
    """The op that consumes a parameter is noted with the dtype of its inputs."""
    w, b, x = weight(), weight(BF16, 4), torch.ones(2, 4, dtype=BF16)
    assert seen(lambda: F.linear(x, w, b), w=w, b=b) == {"w": {"bf16": "aten.addmm"}, "b": {"bf16": "aten.addmm"}}
    assert seen(lambda: w * torch.ones(4), w=w) == {"w": {"fp32": "aten.mul"}}, "promoted"
    assert seen(lambda: F.embedding(torch.tensor([1]), w), w=w) == {"w": {"bf16": "aten.embedding"}}
    assert seen(lambda: (w.sum(), w.float().sum()), w=w) == {"w": {"bf16": "aten.sum", "fp32": "aten.sum"}}
    assert seen(lambda: (x + 1, w.copy_(torch.zeros(4, 4))), w=w) == {}, "a write is no use"


MOVES = {
    "view and cast": lambda w: w.t().float()[:2].t(),
    "copy": lambda w: w.float().clone().view(2, 8),
    "concatenated": lambda w: torch.cat([w, w]).float(),
    "stacked": lambda w: torch.stack([w.float()] * 2).flatten(1),
    "indexed": lambda w: w.float()[torch.tensor([0, 1])],
}


@pytest.mark.parametrize("move", MOVES)
def test_casts_copies_and_views_are_followed_to_the_op_and_not_noted(move):
    w = weight()
    assert seen(lambda: MOVES[move](w).sum(), w=w) == {"w": {"fp32": "aten.sum"}}


def test_a_freed_storage_is_not_taken_for_a_copy():
    """A storage that was freed is not taken for a copy of a parameter."""
    w = weight(torch.float32, 64, 64)

    def forward():
        for _ in range(50):
            w.to(BF16)  # freed at once, but for the observer
        for _ in range(50):
            torch.ones(64, 64, dtype=BF16).sum()

    assert seen(forward, w=w) == {}

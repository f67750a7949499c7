"""The autocast hook: on inside, off outside, whatever happens."""

import pytest
import torch
from torch import nn

from zeroamp.hooks.precision.autocast import AutocastHook


class Probe(nn.Module):
    def __init__(self, action=None):
        super().__init__()
        self.action = action

    def forward(self, depth=0):
        if self.action == "raise":
            raise ValueError("from the forward")
        if depth:
            assert self(depth - 1) == (True, torch.bfloat16)  # a forward that calls its own module
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def test_on_inside_and_off_outside():
    probe = Probe()
    AutocastHook("cpu", torch.bfloat16).attach(probe)
    assert probe(2) == (True, torch.bfloat16)
    assert not torch.is_autocast_enabled("cpu")


def test_off_after_a_forward_that_raises():
    probe = Probe("raise")
    AutocastHook("cpu", torch.bfloat16).attach(probe)
    for _ in range(2):
        with pytest.raises(ValueError, match="from the forward"):
            probe()
        assert not torch.is_autocast_enabled("cpu")


def test_the_hook_can_be_removed():
    probe = Probe()
    for handle in AutocastHook("cpu", torch.bfloat16).attach(probe):
        handle.remove()
    assert probe()[0] is False

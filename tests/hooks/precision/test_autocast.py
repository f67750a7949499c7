"""`torch.autocast` around a forward: the config's own, and every row of the table in hooks/precision/autocast.py."""

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from zeroamp import PrecisionError
from zeroamp.hooks.precision.autocast import enter_autocast, refuse_autocast, warn_of_other_autocast
from zeroamp.hooks.root_forward import RootForward
from zeroamp.hooks.unit_hooks import UnitHooks

OUTER = {
    "none": nullcontext,
    "same": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "other dtype": lambda: torch.autocast("cpu", dtype=torch.float16),
    "disabled": lambda: torch.autocast("cpu", enabled=False),
}


class Probe(nn.Module):
    def forward(self):
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _attached(forward):
    module, hooks = Probe(), UnitHooks()
    forward.add_hooks(module, hooks)
    hooks.register()
    return module


def _with_autocast(dtype=torch.bfloat16):
    """A module with what `wrap_model` attaches for a config with autocast."""
    forward = RootForward()
    forward.add("outer autocast", warn_of_other_autocast("cpu", dtype))
    forward.add("autocast", enter_autocast("cpu", dtype))
    return _attached(forward)


def _without_autocast(mode):
    forward = RootForward()
    forward.add("outer autocast", refuse_autocast("cpu", mode))
    return _attached(forward)


@pytest.mark.parametrize(("outer", "words"), [("none", None), ("same", None),
                         ("other dtype", "torch.autocast('cpu', dtype=torch.float16)"),
                         ("disabled", "torch.autocast('cpu', enabled=False)")])  # fmt: skip
def test_with_autocast_in_the_config_it_wins_and_another_is_warned_about_once(caplog, outer, words):
    for number in (1, 2):  # once per model, not once per process
        probe = _with_autocast()
        for _ in range(3):
            with caplog.at_level(logging.WARNING, logger="zeroamp"), OUTER[outer]():
                assert probe() == (True, torch.bfloat16)
        assert not torch.is_autocast_enabled("cpu")
        assert len(caplog.messages) == number * (words is not None)
    if words:
        assert words in caplog.messages[0]
        assert "torch_autocast.dtype is bf16" in caplog.messages[0]


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_without_autocast_in_the_config_one_around_the_forward_is_refused(mode):
    probe = _without_autocast(mode)
    assert probe()[0] is False
    with torch.autocast("cpu", enabled=False):
        assert probe()[0] is False
    words = (
        rf"dtype=torch.float16\), but the config sets {mode} .*"
        r'"torch_autocast": \{"enabled": true, "dtype": "fp16"\} .*"external_autocast": "allow"'
    )
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(PrecisionError, match=words):
        probe()

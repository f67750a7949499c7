"""`torch.autocast` around a forward: the config's own, and every row of the table in hooks/precision/autocast.py."""

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


def _attached(forward, module):
    hooks = UnitHooks()
    forward.add_hooks(module, hooks)
    hooks.register()


def _with_autocast(module, dtype=torch.bfloat16):
    """Attach what `wrap_model` attaches for a config with autocast; return the module."""
    forward = RootForward()
    forward.add("outer autocast", warn_of_other_autocast("cpu", dtype))
    forward.add("autocast", enter_autocast("cpu", dtype))
    _attached(forward, module)
    return module


def _without_autocast(module, mode):
    forward = RootForward()
    forward.add("outer autocast", refuse_autocast("cpu", mode))
    _attached(forward, module)
    return module


def _probe():
    return _with_autocast(Probe())


@pytest.mark.parametrize(("outer", "words"), [("none", None), ("same", None),
                         ("other dtype", "torch.autocast('cpu', dtype=torch.float16)"),
                         ("disabled", "torch.autocast('cpu', enabled=False)")])  # fmt: skip
def test_with_autocast_in_the_config_it_wins_and_another_is_warned_about_once(caplog, outer, words):
    for number in (1, 2):  # once per model, not once per process
        probe = _probe()
        for _ in range(3):
            with caplog.at_level(logging.WARNING, logger="zeroamp"), OUTER[outer]():
                assert probe() == (True, torch.bfloat16)
        assert not torch.is_autocast_enabled("cpu")
        assert len(caplog.messages) == number * (words is not None)
    if words:
        assert words in caplog.messages[0]
        assert "torch_autocast.dtype is bf16" in caplog.messages[0]


def test_looking_around_leaves_the_callers_autocast_as_it_is():
    probe = _probe()
    with torch.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=torch.float16):
        probe()
        assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == (True, torch.float16)
        depth = torch.autocast_increment_nesting()
        assert torch.autocast_decrement_nesting() == depth - 1 == 2


class Inner(nn.Module):
    """Switches autocast off for itself."""

    def forward(self):
        with torch.autocast("cpu", enabled=False):
            return torch.is_autocast_enabled("cpu")


def test_a_region_that_the_model_opens_itself_is_its_own_business(caplog):
    assert _with_autocast(Inner())() is False
    assert _without_autocast(Inner(), "fp32")() is False
    assert caplog.messages == []


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_without_autocast_in_the_config_one_around_the_forward_is_refused(mode):
    probe = _without_autocast(Probe(), mode)
    assert probe()[0] is False
    with torch.autocast("cpu", enabled=False):
        assert probe()[0] is False
    words = (
        rf"dtype=torch.float16\), but the config sets {mode} .*"
        r'"torch_autocast": \{"enabled": true, "dtype": "fp16"\} .*"external_autocast": "allow"'
    )
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(PrecisionError, match=words):
        probe()


class Recorder(nn.Module):
    """Records the autocast state of every run of its inner function, the recomputing one included."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = []

    def _inside(self, x):
        self.seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return self.linear(x)

    def forward(self, x, use_reentrant=False):
        return checkpoint(self._inside, x, use_reentrant=use_reentrant)


@pytest.mark.parametrize(("outer", "use_reentrant"), [("none", False), ("other dtype", True), ("disabled", False)])
def test_activation_checkpointing_recomputes_under_the_configs_autocast(outer, use_reentrant):
    model = _with_autocast(Recorder())
    with OUTER[outer]():
        output = model(torch.randn(2, 4, requires_grad=True), use_reentrant)
    output.sum().backward()
    assert model.seen == [(True, torch.bfloat16)] * 2

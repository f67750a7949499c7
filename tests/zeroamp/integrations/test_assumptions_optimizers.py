"""What zeroamp assumes of other libraries' optimizers. A failure names the assumption, and the code built on it."""

import inspect

import pytest
import torch

from zeroamp.optimizers.kinds import WHOLE_PARAMETERS

KINDS = "zeroamp/optimizers/kinds.py"


def _parameter():
    return torch.nn.Parameter(torch.ones(2))


def test_bitsandbytes():
    optim = pytest.importorskip("bitsandbytes.optim", reason="the optimizers are bitsandbytes'")
    optimizer = optim.AdamW8bit([_parameter()])
    assert optimizer.initialized is False, f"`initialized` tells the first step: {KINDS}, resolve_overrides"
    assert callable(optimizer.check_overrides), f"check_overrides() finds parameters by identity: {KINDS}"
    manager = optimizer.mng
    manager.pid2config[id(optimizer.param_groups[0]["params"][0])] = {"optim_bits": 32}
    manager.register_parameters(optimizer.param_groups)
    try:
        assert manager.index2config == {(0, 0): {"optim_bits": 32}}, f"settings by position are found later: {KINDS}"
    finally:
        manager.initialize()
    for name in ("LAMB", "LARS"):
        other = getattr(optim, name)([_parameter()], lr=1e-3, **({"momentum": 0.9} if name == "LARS" else {}))
        assert other.args.max_unorm > 0, f"args.max_unorm is set where norms of parameters are used: {KINDS}"
    assert optimizer.args.max_unorm == 0, f"args.max_unorm is 0 where no norms are used: {KINDS}"


def test_transformers():
    transformers = pytest.importorskip("transformers", reason="Adafactor is transformers'")
    name = f"{transformers.Adafactor.__module__}.{transformers.Adafactor.__qualname__}"
    assert name in WHOLE_PARAMETERS, f"known by this name: {KINDS}, WHOLE_PARAMETERS"


def test_torch():
    name = f"{torch.optim.Adafactor.__module__}.{torch.optim.Adafactor.__qualname__}"
    assert name in WHOLE_PARAMETERS, f"known by this name: {KINDS}, WHOLE_PARAMETERS"
    assert "closure" in inspect.signature(torch.optim.LBFGS.step).parameters, "refused by its closure: checks.py"

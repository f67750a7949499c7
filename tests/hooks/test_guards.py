"""Safe modules that run where autocast is locally off are named."""

import pytest
import torch

import zeroamp
from tests.models.small import batch, build
from tests.processes.ranks import RankError
from tests.processes.training import config


def _locally_off(safe_modules):
    model = build("llama_untied")
    block = model.blocks[1]
    forward = block.forward

    def in_fp32(x):
        with torch.autocast("cpu", enabled=False):
            return forward(x.float())

    block.forward = in_fp32
    cfg = config(3)
    cfg["torch_autocast"]["lower_precision_safe_modules"] = safe_modules
    return float(zeroamp.wrap_model(model, zeroamp.policy_from_config(cfg))(batch("llama_untied", 0)).detach())


def test_the_module_is_named(ranks2):
    with pytest.raises(RankError, match="PrecisionError: blocks.1.qkv .*autocast off.*lower_precision_safe_modules"):
        ranks2.run(_locally_off, ["Linear"])

"""Experts of MoE models that run by `torch._grouped_mm`: the dry run takes them, and wrapping warns."""

import logging

import pytest
import torch

import zeroamp
from tests.measuring.logs import log_lines
from tests.models.architectures import mixtral
from tests.models.small import build
from tests.processes.experts import IN_BF16
from tests.processes.training import config, policy
from tests.zeroamp.dry_run.plans import FULL
from zeroamp.ledger.explain import Ledger
from zeroamp.planning.plan import build_plan
from zeroamp.wrapping.summary import describe_uncast_experts


def test_a_mixture_of_experts_of_transformers_is_planned():
    pytest.importorskip("transformers", reason="the model is transformers'")
    model, _, _ = mixtral()
    run = zeroamp.plan_run(model, policy(config(3)), world_size=2, batch=1, seq=16, stages=(3,), gpu=FULL)
    assert run.to_dict()["stages"][0]["peak_bytes"] > 0
    assert "Every expert of an MoE layer gets equally many tokens." in " ".join(str(run).split())


def _warning(model, **options):
    return describe_uncast_experts(build_plan(model, policy(config(3, **options))))


def test_experts_that_stay_in_fp32_under_autocast_are_warned_of():
    pytest.importorskip("transformers", reason="a model is transformers'")
    text = _warning(build("moe"))
    assert "blocks.1.experts.gate_up" in text
    assert "% of the trainable elements are 3-D parameters that stay in fp32" in text
    assert '"modules": ["*.gate_up"], "param": "bf16"' in text
    assert '"modules": ["*.gate_up_proj"], "param": "bf16"' in _warning(mixtral()[0])
    assert _warning(mixtral()[0], zeroamp={"overrides": IN_BF16}) is None
    assert _warning(build("moe"), dtype=None, bf16={"enabled": True}) is None
    assert _warning(build("encoder")) is None


def _warnings():
    with log_lines(logging.WARNING) as texts:
        zeroamp.wrap_model(build("moe"), policy(config(3)))
    return [text for text in texts if "3-D parameters" in text]


def test_wrapping_warns_once_on_the_first_rank(ranks2):
    assert [len(texts) for texts in ranks2.run(_warnings)] == [1, 0]


def test_the_low_share_is_that_of_the_trainable_elements():
    pytest.importorskip("transformers", reason="the model is transformers'")
    model, _, _ = mixtral()
    with_override = build_plan(model, policy(config(3, zeroamp={"overrides": IN_BF16})))
    low = sum(param.numel for param in with_override.params if param.dtypes.param == torch.bfloat16)
    assert with_override.low_share == low / sum(p.numel() for p in model.parameters())
    assert with_override.describe_low_share() == f"{with_override.low_share:.1%} of the trainable elements in bf16"
    assert with_override.describe_low_share() in Ledger(plan=with_override).title()
    assert Ledger(plan=with_override).to_dict()["low_share"] == with_override.low_share
    assert build_plan(model, policy(config(3, dtype=None))).describe_low_share() == ""

"""Experts of MoE models that run by `torch._grouped_mm`: the dry run takes them, and wrapping warns."""

import logging

import pytest
import torch

import zeroamp
from tests.models.architectures import mixtral
from tests.models.small import build
from tests.processes.experts import IN_BF16
from tests.processes.training import config, policy
from zeroamp.ledger.explain import Ledger
from zeroamp.planning.plan import build_plan
from zeroamp.wrapping.summary import describe_uncast_experts


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"dtype": None, "bf16": {"enabled": True}}, marks=pytest.mark.slow),
        pytest.param({"dtype": None}, marks=pytest.mark.slow),
    ],
    ids=["autocast", "bf16", "fp32"],
)
def test_a_mixture_of_experts_of_transformers_is_planned(options):
    pytest.importorskip("transformers", reason="the model is transformers'")
    model, _, _ = mixtral("grouped_mm")
    run = zeroamp.plan_run(model, policy(config(3, **options)), world_size=2, batch=1, seq=16, stages=(3,))
    assert run.to_dict()["stages"][0]["peak_bytes"] > 0


def test_experts_that_stay_in_fp32_under_autocast_are_warned_of():
    text = _warning(build("moe"))
    assert "blocks.1.experts.gate_up" in text
    assert "% of the trainable elements are 3-D parameters that stay in fp32" in text
    assert '"modules": ["*.gate_up"], "param": "bf16"' in text
    assert _warning(build("moe"), dtype=None, bf16={"enabled": True}) is None
    assert _warning(build("llama_tied")) is None
    assert _warning(build("encoder")) is None


def _warning(model, **options):
    return describe_uncast_experts(build_plan(model, policy(config(3, **options))))


def test_experts_in_bf16_are_not_warned_of():
    pytest.importorskip("transformers", reason="the model is transformers'")
    assert '"modules": ["*.gate_up_proj"], "param": "bf16"' in _warning(mixtral()[0])
    assert _warning(mixtral()[0], zeroamp={"overrides": IN_BF16}) is None


def _warnings():
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("zeroamp").addHandler(handler)
    try:
        zeroamp.wrap_model(build("moe"), policy(config(3)))
    finally:
        logging.getLogger("zeroamp").removeHandler(handler)
    return [text for text in records if "3-D parameters" in text]


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


@pytest.fixture(scope="module")
def mixtral_8x7b():
    """Of the published shape, on the meta device."""
    transformers = pytest.importorskip("transformers", reason="the model is transformers'")
    with torch.device("meta"):
        return transformers.MixtralForCausalLM(transformers.MixtralConfig())


@pytest.mark.slow
def test_mixtral_8x7b_is_all_gathered_in_bf16_with_the_override(mixtral_8x7b):
    numel = sum(parameter.numel() for parameter in mixtral_8x7b.parameters())
    gathered = {}
    for is_low in (False, True):
        plan = build_plan(mixtral_8x7b, policy(config(3, zeroamp={"overrides": IN_BF16 if is_low else []})))
        assert (plan.low_share >= 0.95) == is_low
        ledger = Ledger(plan=plan, num_shards=64)  # dimension 0, of 8 experts, would be padded to 64 rows
        gathered[is_low] = sum(row["all_gathered_bytes_per_step"] for row in ledger.group_rows())
        experts = [row for row in ledger.parameter_rows() if ".experts." in row["parameter"]]
        assert len(experts) == 2 * mixtral_8x7b.config.num_hidden_layers
        stored = sum(row["stored_bytes_per_rank"] for row in experts)
        assert stored <= 1.02 / 64 * 4 * sum(row["elements"] for row in experts)
    assert gathered[True] <= 2.1 * 2 * numel
    assert gathered[False] > 3.9 * 2 * numel

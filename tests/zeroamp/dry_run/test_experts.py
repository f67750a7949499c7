"""Experts of MoE models that run by `torch._grouped_mm`: the dry run takes them, counts them, and wrapping warns."""

import logging

import pytest
import torch
from torch import nn

import zeroamp
from tests.models.architectures import mixtral
from tests.models.small import build
from tests.processes.training import config, policy
from zeroamp.planning.plan import build_plan
from zeroamp.reporting.flops import count_flops
from zeroamp.wrapping.summary import describe_uncast_experts

TOKENS, WIDTH, INNER, EXPERTS = 24, 16, 32, 4


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EXPERTS, WIDTH, INNER, dtype=torch.bfloat16))

    def forward(self, x):
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (TOKENS // EXPERTS)
        return torch._grouped_mm(x, self.weight, offs=ends).square().sum()  # a gradient without strides of 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_flops_of_a_grouped_product_are_counted(dtype):
    x = torch.zeros(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    product = 2 * TOKENS * WIDTH * INNER
    assert count_flops(Experts().to(dtype), (x,)) == 3 * product  # forward, and the gradients of both


@pytest.mark.parametrize(
    "options", [{}, {"dtype": None, "bf16": {"enabled": True}}, {"dtype": None}], ids=["autocast", "bf16", "fp32"]
)
def test_a_mixture_of_experts_of_transformers_is_planned(options):
    pytest.importorskip("transformers", reason="the model is transformers'")
    model, _, _ = mixtral("grouped_mm")
    run = zeroamp.plan_run(model, policy(config(3, **options)), world_size=2, batch=1, seq=16, stages=(3,))
    assert run.to_dict()["stages"][0]["peak_bytes"] > 0


def test_experts_that_stay_in_fp32_under_autocast_are_warned_of():
    text = describe_uncast_experts(build_plan(build("moe"), policy(config(3))))
    assert "blocks.1.experts.gate_up" in text
    assert "% of the trainable elements are 3-D parameters that stay in fp32" in text
    for quiet in (
        build_plan(build("moe"), policy(config(3, dtype=None, bf16={"enabled": True}))),
        build_plan(build("llama_tied"), policy(config(3))),
        build_plan(build("encoder"), policy(config(3))),
    ):
        assert describe_uncast_experts(quiet) is None


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

"""Which weights are planned in float8, and what a step moves then. Needs no torchao."""

import sys

import pytest
from torch import nn

import zeroamp
from tests.models.small import build
from tests.processes.training import config, policy
from tests.zeroamp.dry_run.plans import plan as planned_run
from zeroamp.dry_run.planned_traffic import plan_traffic
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import build_plan

FLOAT8 = {"param_gather_dtype": "float8_e4m3fn"}
BF16 = {"dtype": None, "bf16": {"enabled": True}}


def plan(model, stage=3, *, zeroamp=FLOAT8, **options):
    model = build(model) if isinstance(model, str) else model
    return build_plan(model, policy(config(stage, zeroamp=zeroamp, **options)))


def float8(planned):
    return {param.fqn for param in planned.params if param.has_own_gather_dtype}


def linears(model):
    return {f"{fqn}.weight" for fqn, module in model.named_modules() if isinstance(module, nn.Linear)}


@pytest.mark.parametrize("options", [{}, BF16], ids=["autocast", "bf16"])
def test_all_weights_that_linears_alone_read_are_float8(options):
    model = build("llama_untied")
    assert float8(plan(model, **options)) == linears(model)
    tied = build("llama_tied")  # the embedding reads the head's weight
    assert float8(plan(tied, **options)) == linears(tied) - {"head.weight"}
    encoder = build("encoder")  # nn.MultiheadAttention reads the weight of its out_proj
    out_proj = {f"encoder.layers.{index}.self_attn.out_proj.weight" for index in range(2)}
    assert float8(plan(encoder, **options)) == linears(encoder) - out_proj - {"head.weight"}


def test_a_weight_of_two_linears_is_float8_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert float8(plan(model)) == {"0.weight"}


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.weight.mean()


def test_classes_with_a_forward_of_their_own_frozen_bf16_and_overridden_weights_are_not():
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("plain", "frozen", "low", "high", "sent")})
    model["own"] = Own(4, 4)
    model["patched"] = nn.Linear(4, 4)
    model["patched"].forward = lambda x: 3 * x
    model["frozen"].requires_grad_(False).bfloat16()
    overrides = [
        {"modules": "low", "param": "bf16"},
        {"modules": "high", "param": "fp32"},
        {"modules": "sent", "communication": "fp32"},
    ]
    assert float8(plan(model, zeroamp={**FLOAT8, "overrides": overrides})) == {"plain.weight", "sent.weight"}


def test_a_model_without_such_a_weight_is_refused():
    for model, options in ((nn.Conv2d(3, 3, 3), {}), (build("llama_tied").embed, BF16)):
        with pytest.raises(zeroamp.ConfigError, match="has no Linear whose fp32 weight would be all-gathered in bf16"):
            plan(model, **options)


def test_groups_and_calls_are_those_of_bf16_and_weights_move_half_the_bytes():
    low, high = plan("llama_untied"), plan("llama_untied", zeroamp={})

    def by_group(planned):
        traffic = plan_traffic(planned, Ranks(num_shards=4))
        return {(key.collective, key.group): (calls, traffic.num_bytes[key]) for key, calls in traffic.calls.items()}

    found, expected = by_group(low), by_group(high)
    assert found.pop(("all_reduce", "float8 scales")) == (1, 4 * len(float8(low)))
    for group in low.groups:
        calls, num_bytes = expected["all_gather", group.name]
        saved = sum(param.numel for param in group.params if param.has_own_gather_dtype)
        expected["all_gather", group.name] = calls, num_bytes - calls * saved
    assert found == expected


def test_a_planned_run_holds_float8_and_one_bf16_copy(monkeypatch):
    """At stage 2 all parameters are unsharded at once: a byte less per element of a weight, and the copy of one."""
    monkeypatch.setitem(sys.modules, "torchao", None)  # an import would raise
    low, high = (
        planned_run({"zeroamp": keys, **BF16}, build("llama_untied"), world_size=16, stages=(2, 3))
        for keys in (FLOAT8, {})
    )
    weights = [param.numel for param in low.stages[0].plan.params if param.has_own_gather_dtype]
    less, more = (run.stages[0].memory.peak("backward") for run in (low, high))
    assert more["unsharded parameters"] - less["unsharded parameters"] == sum(weights)
    assert less["workspace"] - more["workspace"] == 2 * max(weights)
    assert low.to_dict()["stages"][1]["peak_bytes"] < high.to_dict()["stages"][1]["peak_bytes"]

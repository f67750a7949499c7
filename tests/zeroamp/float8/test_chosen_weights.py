"""What `zeroamp.param_gather_dtype` is refused with in a config, and which weights it is planned for. No torchao."""

import sys

import pytest
import torch
from torch import nn

import zeroamp
from tests.models.small import build
from tests.processes.training import config, policy
from tests.zeroamp.dry_run.plans import plan as planned_run
from zeroamp import ConfigError, policy_from_config
from zeroamp.float8.conflicts import CONFLICTS, KEY
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


def test_classes_with_a_forward_of_their_own_are_not_chosen():
    """Classes with a forward of their own frozen bf16 and overridden weights are not."""
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


PLAIN = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
SET = {
    "no low precision (mode fp32)": {"bf16": {"enabled": False}},
    "float16 compute": {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "float16"}},
    "zero_optimization.stage 0": {"zero_optimization": {"stage": 0}},
    "zero_optimization.zero_hpz_partition_size": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
    "zero_optimization.offload_param": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
}


def _config(cfg):
    return {**PLAIN, **cfg, "zeroamp": {"param_gather_dtype": "float8_e4m3fn", **cfg.get("zeroamp", {})}}


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda conflict: conflict.name)
def test_a_conflict_is_refused_by_its_name(conflict):
    with pytest.raises(ConfigError) as caught:
        policy_from_config(_config(SET[conflict.name]))
    text = str(caught.value)
    assert text.startswith(f'{KEY} is "float8_e4m3fn", which is not supported with {conflict.name}: ')
    assert text.endswith(conflict.instead)
    without = {**PLAIN, **SET[conflict.name]}
    assert policy_from_config(without).param_gather_dtype is None


def test_the_key_takes_one_dtype():
    assert policy_from_config(_config({})).param_gather_dtype == torch.float8_e4m3fn
    assert policy_from_config(PLAIN).replace(param_gather_dtype="float8_e4m3fn") == policy_from_config(_config({}))
    for value in ("float8_e5m2", "fp8", "bf16", 8, True):
        with pytest.raises(ConfigError, match=KEY):
            policy_from_config({**PLAIN, "zeroamp": {"param_gather_dtype": value}})

"""`zeroamp.overrides` in a plan: which parameters an override applies to, with which dtypes, and what is refused."""

import json
import re

import pytest
import torch
from torch import nn

import zeroamp
from tests.models.small import WIDTH, Llama, hf_llama
from tests.processes.launch import ROOT
from zeroamp.ledger.explain import Ledger
from zeroamp.module_dtypes.extension import overridden
from zeroamp.module_dtypes.kept_in_fp32 import find_fp32_regions
from zeroamp.module_dtypes.overrides import find_overrides

BF16, FP32 = torch.bfloat16, torch.float32
MODES = {
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "bf16": {"bf16": {"enabled": True}},
}


TIED = {"model": Llama(tied=True)}


def policy_of(*overrides, mode="autocast", stage=3, **options):
    zeroamp_block = {"overrides": list(overrides), **options.pop("zeroamp", {})}
    return zeroamp.policy_from_config(
        {**MODES[mode], "zero_optimization": {"stage": stage}, "zeroamp": zeroamp_block, **options}
    )


def plan_of(*overrides, model=None, **options):
    return zeroamp.build_plan(Llama(tied=False) if model is None else model, policy_of(*overrides, **options))


def cells(plan):
    return {p.fqn: (p.dtypes.param, p.dtypes.compute, p.dtypes.communication) for p in plan.params}


def reasons(plan):
    return {p.fqn: p.reason for p in plan.params}


def test_each_dtype_by_itself():
    plan = plan_of(
        {"modules": "head", "compute": "fp32", "communication": "fp32"},
        {"modules": "Embedding", "param": "bf16"},
        {"modules": "blocks.0.qkv", "param": "fp32"},
        {"modules": "blocks.1.qkv.weight", "communication": "fp32"},
        {"modules": "norm?", "compute": "bf16"},
        {"modules": "*.bias", "param": "bf16", "communication": "fp32"},
    )
    found = cells(plan)
    assert found["head.weight"] == (FP32, "fp32", FP32)
    assert found["embed.weight"] == (BF16, "per op", BF16)
    assert found["blocks.0.qkv.weight"] == (FP32, "per op", FP32)
    assert found["blocks.1.qkv.weight"] == (BF16, "bf16", FP32)
    assert found["blocks.2.qkv.weight"] == (BF16, "bf16", BF16)
    assert found["blocks.2.norm1.weight"] == (BF16, "bf16", BF16)
    assert found["norm.weight"] == (FP32, "per op", FP32)
    assert found["blocks.2.down.bias"] == (BF16, "bf16", FP32)
    said = reasons(plan)
    assert said["head.weight"] == "zeroamp.overrides.0 (modules 'head'): compute fp32, communication fp32"
    override = "zeroamp.overrides.3 (modules 'blocks.1.qkv.weight'): communication fp32"
    assert said["blocks.1.qkv.weight"] == f"safe: owned by Linear; {override}"
    assert list(plan.fp32_regions.modules) == ["head"]
    rows = {row["parameter"]: row["why"] for row in Ledger(plan=plan).parameter_rows()}
    assert rows["head.weight"] == said["head.weight"]


def test_the_first_match_counts_whichever_is_the_narrower():
    narrow, wide = {"modules": "blocks.1", "communication": "fp32"}, {"modules": "Linear", "param": "fp32"}
    found = cells(plan_of(narrow, wide))
    assert (found["blocks.1.qkv.weight"], found["blocks.0.qkv.weight"][0]) == ((BF16, "bf16", FP32), FP32)
    found = cells(plan_of(wide, narrow, {"modules": "*", "communication": "bf16"}))
    assert found["blocks.1.qkv.weight"] == found["blocks.0.qkv.weight"] == (FP32, "per op", FP32)
    assert found["blocks.1.norm1.weight"][2] == FP32
    assert found["blocks.0.norm1.weight"][2] == BF16


def test_overrides_come_before_the_answers_of_a_traced_run():
    autocast = {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": "auto"}
    overrides = {"modules": "qkv", "param": "fp32"}, {"modules": "embed", "param": "bf16"}
    policy = policy_of(*overrides, torch_autocast=autocast)
    plan = zeroamp.build_plan(Llama(tied=False), policy, example_inputs=torch.zeros(1, 4, dtype=torch.int64))
    found = cells(plan)
    assert (found["blocks.0.qkv.weight"][0], found["embed.weight"][0], found["head.weight"][0]) == (FP32, BF16, BF16)


class Gate(nn.Linear):
    pass


class Twice(nn.Module):
    """A block under two names, a module whose name is that of a class, and a 0-D parameter."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.second = self.first
        self.Gate = nn.Linear(WIDTH, WIDTH)
        self.gate = Gate(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.act = nn.ReLU()


def test_a_module_with_two_names_is_covered_by_either():
    for name in ("first", "second"):
        plan = plan_of({"modules": name, "compute": "fp32"}, model=Twice(), mode="bf16")
        assert cells(plan)["first.0.weight"] == (FP32, "fp32", FP32)
    policy = policy_of(mode="bf16", data_types={"keep_in_fp32_modules": ["second"]})
    model = Twice()
    regions = find_fp32_regions(model, policy, find_overrides(model, policy))
    assert regions.modules_of(model) == [model.first]
    assert cells(zeroamp.build_plan(model, policy))["first.0.weight"] == (FP32, "fp32", FP32)


def test_the_modules_of_a_list_are_the_regions():
    """A list of modules is never called so its modules are the regions."""
    blocks = {f"blocks.{index}" for index in range(3)}
    plan = plan_of({"modules": "blocks", "compute": "fp32"})
    assert set(plan.fp32_regions.modules) == blocks
    assert cells(plan)["blocks.0.qkv.weight"] == (FP32, "fp32", FP32)
    kept = zeroamp.build_plan(Llama(tied=False), policy_of(data_types={"keep_in_fp32_modules": ["blocks"]}))
    assert set(kept.fp32_regions.modules) == blocks
    assert cells(kept) == cells(plan)


@pytest.mark.parametrize(
    ("overrides", "options", "words"),
    [
        ([{"modules": "haed", "compute": "fp32"}], {}, "overrides.0 .modules 'haed'. matches no .*mean 'head'"),
        ([{"modules": ["head", "x.*"], "compute": "fp32"}], {}, r"modules 'x\.\*'. matches no"),
        (
            [{"modules": "head.weight", "compute": "fp32"}],
            {},
            "sets compute, but head.weight is a parameter.*set param, which",
        ),
        ([{"modules": "Llama", "compute": "fp32"}], {}, "compute fp32 for the root, Llama"),
        (
            [{"modules": "Linear", "param": "fp32"}, {"modules": "head", "compute": "fp32"}],
            {},
            "overrides.1 .modules 'head'. applies to nothing, because zeroamp.overrides.0 .modules 'Linear'. is",
        ),
        (
            [{"modules": "qkv", "compute": "bf16"}, {"modules": "blocks.0", "compute": "fp32"}],
            {},
            "overrides.0 .modules 'qkv'. sets compute bf16 for blocks.0.qkv.weight, but zeroamp.overrides.1",
        ),
        (
            [{"modules": "head", "param": "bf16"}],
            {"data_types": {"keep_in_fp32_modules": ["head"]}},
            "sets param bf16 for head.weight, but data_types.keep_in_fp32_modules 'head' keeps head.weight in fp32",
        ),
        (
            [{"modules": "embed", "param": "bf16"}, {"modules": "head", "compute": "fp32"}],
            TIED,
            "overrides.0 .modules 'embed'. sets param bf16 for embed.weight, but zeroamp.overrides.1 .modules "
            "'head'. sets compute fp32 for head.weight, which is the same parameter",
        ),
        ([{"modules": "head", "param": "bf16"}], TIED, "for head.weight, but not for embed.weight, which is the same"),
        (
            [{"modules": "head", "compute": "fp32"}],
            {"mode": "bf16", **TIED},
            "overrides.0 .modules 'head'. keeps head.weight in fp32 but not embed.weight, which is the same",
        ),
    ],
)
def test_what_a_model_cannot_do_as_asked_is_refused_by_name(overrides, options, words):
    with pytest.raises(zeroamp.ConfigError, match=words):
        plan_of(*overrides, **options)


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ([{"modules": "blocks.0", "compute": "fp32"}, {"modules": "qkv", "compute": "bf16"}], {"mode": "bf16"}),
        ([{"modules": "head", "communication": "bf16"}], {"data_types": {"keep_in_fp32_modules": ["head"]}}),
        ([{"modules": ["head", "embed"], "param": "bf16"}], TIED),
    ],
)
def test_what_does_not_contradict_is_planned(overrides, options):
    assert "overrides" in "".join(reasons(plan_of(*overrides, **options)).values())


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("Gate", {"Gate.weight", "gate.weight"}),  # a name, and a class
        (f"{__name__}.Gate", {"gate.weight"}),
        ("torch.nn.LayerNorm", {"first.1.weight"}),  # a public name of the class
        ("*Norm", {"first.1.weight"}),
        ("g*.weight", {"gate.weight"}),
    ],
)
def test_patterns_are_names_and_classes_in_both_keys(pattern, names):
    plan = plan_of({"modules": pattern, "param": "bf16"}, model=Twice())
    weights = [param for param in plan.params if param.fqn.endswith("weight")]
    assert {param.fqn for param in weights if "overrides.0" in param.reason} == names
    kept = zeroamp.build_plan(Twice(), policy_of(mode="bf16", data_types={"keep_in_fp32_modules": [pattern]}))
    assert {param.fqn for param in kept.params if param.fqn.endswith("weight") and param.dtypes.param == FP32} == names


def test_a_frozen_parameter_is_all_gathered_as_it_is_stored():
    model = Llama(tied=False)
    model.head.to(torch.float16).requires_grad_(False)
    with pytest.raises(zeroamp.ConfigError, match="is frozen and stored in fp16, so it is all-gathered in that dtype"):
        plan_of(
            {"modules": ["head", "qkv"], "param": "bf16"}, {"modules": "norm", "communication": "bf16"}, model=model
        )
    with pytest.raises(zeroamp.ConfigError, match="keeps head.weight in fp32, but it is stored in fp16"):
        plan_of({"modules": "head", "compute": "fp32"}, model=model)


def test_the_example_of_the_docs_is_a_config_for_a_llama():
    pytest.importorskip("transformers", reason="the model is transformers'")
    examples = re.findall(r"```json\n(.*?)```", (ROOT / "docs/exceptions.md").read_text(), re.DOTALL)
    (example,) = [json.loads(text) for text in examples if "overrides" in text]
    model = hf_llama(tied=False)
    plan = zeroamp.build_plan(model, zeroamp.policy_from_config(example))
    assert all(overridden(plan, index) for index in range(len(example["zeroamp"]["overrides"])))
    found = cells(plan)
    assert found["lm_head.weight"] == (FP32, "fp32", FP32)
    assert found["model.embed_tokens.weight"][0] == BF16
    assert found["model.norm.weight"] == found["model.layers.0.input_layernorm.weight"] == (FP32, "per op", BF16)


def test_ignored_parameters_count_as_owned_by_a_safe_class():
    model = Llama(tied=False)
    linears = [each for module in model.modules() if isinstance(module, nn.Linear) for each in module.parameters()]
    plan = zeroamp.build_plan(model, policy_of(), ignored_params=linears)
    assert {param.dtypes.param for group in plan.groups for param in group.params} == {FP32}

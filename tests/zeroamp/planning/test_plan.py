"""Units, dtypes and groups, on the meta device: nothing here runs."""

import warnings

import pytest
import torch
from torch import nn

import zeroamp
from tests.models.small import Llama
from tests.processes.training import config
from zeroamp.planning.mesh import Ranks
from zeroamp.wrapping.summary import size_summary


def plan(model, auto_wrap_policy=None, **options):
    return zeroamp.build_plan(model, zeroamp.policy_from_config(config(**options)), auto_wrap_policy)


def meta(factory, *args, **kwargs):
    with torch.device("meta"):
        return factory(*args, **kwargs)


NORMS = {f"blocks.{index}.norm{number}.weight" for index in range(3) for number in (1, 2)}


def groups(plan):
    return {group.name: {param.fqn for param in group.params} for group in plan.groups}


def low(plan):
    return {param.fqn for param in plan.params if param.dtypes.param == torch.bfloat16}


def test_a_tied_weight_is_unsafe_where_one_owner_is():
    built = plan(meta(Llama, tied=True))
    embed = next(param for param in built.params if param.fqn == "embed.weight")
    assert embed.aliases == ("head.weight",)
    assert embed.unit == ""
    assert embed.dtypes.param == torch.float32
    assert embed.reason == "not safe: owned by Embedding (embed), tied with head.weight"
    assert groups(built)["root"] == {"embed.weight", "norm.weight"}


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (None, {"root": {"head.weight"}, "model-wide:fp32": NORMS | {"embed.weight", "norm.weight"}}),
        (0, {"root": {"head.weight"}, "root:fp32": {"embed.weight", "norm.weight"}}),
    ],
    ids=["with the norms", "on its own"],
)
def test_the_group_of_the_embedding_of_an_untied_head(threshold, expected):
    built = groups(plan(meta(Llama, tied=False), threshold=threshold, zeroamp={"own_units": False}))
    assert {name: fqns for name, fqns in built.items() if not name.startswith("blocks")} == expected


def test_fp32_adapters_on_a_frozen_bf16_base_are_groups_apart():
    model = meta(Llama, tied=True).bfloat16().requires_grad_(False)
    for block in model.blocks:
        block.adapter = nn.Linear(32, 4, device="meta")
    built = plan(model)
    assert groups(built)["blocks.0:bf16"] == {"blocks.0.adapter.weight", "blocks.0.adapter.bias"}
    assert all(param.dtypes.param == torch.bfloat16 for param in built.params if "norm" in param.fqn)


def test_frozen_bf16_parameters_are_one_group():
    """Frozen bf16 parameters are one group and no two groups share a name."""
    model = meta(Llama, tied=True)
    for block in model.blocks:
        block.norm1.bfloat16().requires_grad_(False)  # unsafe
        block.out.bfloat16().requires_grad_(False)  # safe, and smaller than the trainable rest
    built = plan(model)
    frozen = {"blocks.0.norm1.weight", "blocks.0.out.weight"}
    assert groups(built)["blocks.0:bf16 (stored bf16)"] == frozen
    assert len(groups(built)) == len(built.groups)


def test_a_module_in_two_units_belongs_to_the_innermost_unit_around_both():
    model = meta(Llama, tied=True)
    model.blocks[2].norm1 = model.blocks[0].norm1
    model.blocks[1].norm2 = model.blocks[1].norm1
    units = {param.fqn: param.unit for param in plan(model).params}
    assert units["blocks.0.norm1.weight"] == ""
    assert units["blocks.1.norm1.weight"] == "blocks.1"


def test_a_block_that_is_registered_twice_is_one_unit():
    model = meta(Llama, tied=True)
    model.blocks[2] = model.blocks[0]
    built = plan(model)
    assert set(built.units) == {"blocks.0", "blocks.1"}
    assert {param.unit for param in built.params if "qkv" in param.fqn} == {"blocks.0", "blocks.1"}


def test_stage_0_says_that_its_wire_is_fp32_unless_native():
    assert {p.dtypes.communication for p in plan(meta(Llama, tied=True), stage=0).params} == {torch.float32}
    native = plan(meta(Llama, tied=True), stage=0, zeroamp={"reduce_accumulate_dtype": "native"})
    assert {p.dtypes.communication for p in native.params} == {torch.float32, torch.bfloat16}


def test_stage_3_without_units_is_warned_of(caplog):
    with caplog.at_level("WARNING", logger="zeroamp"):
        plan(meta(nn.Linear, 4, 4))
        plan(meta(nn.Linear, 4, 4), stage=2)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["Linear has no units below its root"]


def test_other_parameters_of_torchs_safe_classes_are_unsafe():
    model = meta(Llama, tied=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old weight_norm is deprecated, and still in use
        torch.nn.utils.weight_norm(model.blocks[0].out)
    assert "blocks.0.out.weight_v" not in low(plan(model))
    assert "blocks.0.qkv.weight" in low(plan(model))


def test_all_parameters_of_a_listed_class_of_the_users_are_safe():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

    model = meta(nn.Sequential, meta(Scaled))
    assert low(plan(model)) == {"0.weight", "0.bias"}
    model.own = None
    cfg = config()
    cfg["torch_autocast"]["lower_precision_safe_modules"] = ["Scaled"]
    built = zeroamp.build_plan(model, zeroamp.policy_from_config(cfg))
    assert low(built) == {"0.weight", "0.bias", "0.scale"}


def test_a_parameter_without_elements_is_in_no_group():
    model = meta(Llama, tied=True)
    model.nothing = nn.Parameter(torch.empty(0, 4, device="meta"))
    built = plan(model)
    assert [param.fqn for param in built.empty_params] == ["nothing"]
    assert "nothing" not in {param.fqn for param in built.params}


def test_a_trainable_parameter_in_fp64_is_refused():
    model = meta(Llama, tied=True)
    model.blocks[1].out.double()
    with pytest.raises(zeroamp.WrapError, match=r"blocks.1.out.weight .*in fp32, bf16 or fp16, but .*fp64.* \.float"):
        plan(model)


def test_safe_modules_that_own_nothing_are_refused():
    cfg = {**config(), "torch_autocast": {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": ["Conv1d"]}}
    with pytest.raises(zeroamp.ConfigError, match="lower_precision_safe_modules.*Conv1d.*Llama"):
        zeroamp.build_plan(meta(Llama, tied=True), zeroamp.policy_from_config(cfg))


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        ({"stage": 3, "stage3_max_live_parameters": 1e9}, "zero_optimization.stage3_max_live_parameters leaves"),
        ({"stage": 2, "stage3_max_live_parameters": 1e9}, None),
        ({"stage": 3, "stage3_max_live_parameters": 12_000}, None),
    ],
)
def test_options_that_leave_little_of_stage_3_are_warned_about(caplog, zero, words):
    cfg = {"torch_autocast": {"enabled": True, "dtype": "bf16"}, "zero_optimization": zero}
    zeroamp.build_plan(Llama(tied=True), zeroamp.policy_from_config(cfg))
    assert [message.startswith(words or "?") for message in caplog.messages] == ([True] if words else [])


def test_a_parameter_of_exactly_the_threshold_is_not_small():
    sizes = {threshold: plan(meta(Llama, tied=False), threshold=threshold) for threshold in (32, 33)}
    assert groups(sizes[32])["blocks.0:fp32"] == {"blocks.0.norm1.weight", "blocks.0.norm2.weight"}
    assert {"blocks.0.norm1.weight", "norm.weight"} <= groups(sizes[33])["model-wide:fp32"]


def test_the_summary_of_a_model_without_repeated_blocks_names_what_makes_units():
    text = size_summary(plan(nn.Linear(2, 2)), Ranks(num_shards=2), name="Linear", seconds=0.0)
    assert "0 FSDP units below the root (see auto_wrap_policy)" in text

"""Units, dtypes and groups, on the meta device: nothing here runs."""

import warnings

import pytest
import torch
from torch import nn

import zeroamp
from tests.models.small import ConvNet, Encoder, HfLlama, Llama
from tests.processes.training import config
from tests.processes.training import policy as policy_of


def plan(model, auto_wrap_policy=None, **options):
    return zeroamp.build_plan(model, zeroamp.policy_from_config(config(**options)), auto_wrap_policy)


def meta(factory, *args, **kwargs):
    with torch.device("meta"):
        return factory(*args, **kwargs)


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


@pytest.mark.parametrize("threshold", [None, 1000])
def test_the_embedding_of_an_untied_head_travels_with_the_norms_whatever_its_size(threshold):
    built = plan(meta(Llama, tied=False), threshold=threshold, zeroamp={"own_units": False})
    assert groups(built)["root"] == {"head.weight"}
    assert groups(built)["model-wide:fp32"] >= {"embed.weight", "norm.weight", "blocks.0.norm1.weight"}
    assert "root:fp32" not in groups(built)


def test_without_small_parameters_the_embedding_is_a_group_of_its_own():
    built = plan(meta(Llama, tied=False), threshold=0, zeroamp={"own_units": False})
    assert groups(built)["root:fp32"] == {"embed.weight", "norm.weight"}


def test_attention_weights_that_multihead_attention_owns_are_unsafe_and_subclasses_of_linear_safe():
    built = plan(meta(Encoder))
    assert "encoder.layers.0.self_attn.out_proj.weight" in low(built)  # NonDynamicallyQuantizableLinear
    assert "encoder.layers.0.self_attn.in_proj_weight" not in low(built)
    assert "position" in groups(built)["root"]


def test_a_threshold_of_zero_gives_each_unit_its_own_fp32_group():
    built = plan(meta(Llama, tied=True), threshold=0)
    assert groups(built)["blocks.1:fp32"] == {"blocks.1.norm1.weight", "blocks.1.norm2.weight"}
    assert "model-wide:fp32" not in groups(built)


def test_every_parameter_is_in_exactly_one_group():
    for factory in (lambda: Llama(tied=True), lambda: Llama(tied=False), ConvNet, Encoder, HfLlama):
        model = factory()
        built = plan(model)
        assert sorted(param.fqn for param in built.params) == sorted(fqn for fqn, _ in model.named_parameters())


def test_fp32_mode_needs_one_group_per_unit():
    assert [group.kind for group in plan(meta(Llama, tied=True), dtype=None).groups] == ["unit"] * 4


def test_frozen_parameters_share_the_group_of_their_dtypes():
    model = meta(Llama, tied=True)
    model.blocks[0].qkv.requires_grad_(False)
    built = plan(model)
    assert "blocks.0.qkv.weight" in groups(built)["blocks.0"]
    row = next(param for param in built.params if param.fqn == "blocks.0.qkv.weight")
    assert row.dtypes.communication is row.dtypes.accumulate is row.dtypes.optimizer is None


def test_fp32_adapters_on_a_frozen_bf16_base_are_groups_apart():
    model = meta(Llama, tied=True).bfloat16().requires_grad_(False)
    for block in model.blocks:
        block.adapter = nn.Linear(32, 4, device="meta")
    built = plan(model)
    assert groups(built)["blocks.0:bf16"] == {"blocks.0.adapter.weight", "blocks.0.adapter.bias"}
    assert all(param.dtypes.param == torch.bfloat16 for param in built.params if "norm" in param.fqn)


def test_frozen_bf16_parameters_are_one_group_and_no_two_groups_share_a_name():
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


@pytest.mark.parametrize("given", [config(), "config.json"])
def test_a_config_in_place_of_a_policy_is_refused(given):
    words = f"policy must be a Policy, but is a {type(given).__name__}. Pass zeroamp.policy_from_config"
    with pytest.raises(zeroamp.WrapError, match=words):
        zeroamp.build_plan(meta(Llama, tied=True), given)
    with pytest.raises(zeroamp.WrapError, match=words):
        zeroamp.plan_run(meta(Llama, tied=True), given, world_size=2)


def test_safe_modules_that_own_nothing_are_refused():
    cfg = {**config(), "torch_autocast": {"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": ["Conv1d"]}}
    with pytest.raises(zeroamp.ConfigError, match="lower_precision_safe_modules.*Conv1d.*Llama"):
        zeroamp.build_plan(meta(Llama, tied=True), zeroamp.policy_from_config(cfg))


BLOCK = 10_272 + 64  # elements of one block of Llama: its Linear layers and its norms


def merged(model, size, auto_wrap_policy=None, **fields):
    policy = policy_of(config(), {"reduce_bucket_size": size, **fields})
    built = zeroamp.build_plan(model, policy, auto_wrap_policy)
    return built.units, dict(built.merged)


@pytest.mark.parametrize(
    ("size", "units"),
    [(0, [1, 1, 1, 1]), (2 * BLOCK - 1, [1, 1, 1, 1]), (2 * BLOCK, [2, 2]), (3 * BLOCK, [3, 1]), (10**9, [4])],
)
def test_neighbouring_units_are_merged_while_they_fit_the_bucket(size, units):
    names, joined = merged(meta(Llama, tied=True, num_blocks=4), size)
    assert [len(joined.get(name, (name,))) for name in names] == units
    assert [fqn for name in names for fqn in joined.get(name, (name,))] == [f"blocks.{i}" for i in range(4)]
    assert all(fqns[0] == name for name, fqns in joined.items())


def test_a_merged_unit_has_the_groups_of_one_unit():
    policy = policy_of(config(threshold=0), {"reduce_bucket_size": 2 * BLOCK})
    built = zeroamp.build_plan(meta(Llama, tied=True), policy)
    assert list(groups(built)) == ["root", "blocks.0", "blocks.0:fp32", "blocks.2", "blocks.2:fp32"]
    assert groups(built)["blocks.0:fp32"] == {f"blocks.{i}.norm{j}.weight" for i in (0, 1) for j in (1, 2)}
    assert built.modules_of("blocks.0") == ("blocks.0", "blocks.1")
    assert built.modules_of("blocks.2") == ("blocks.2",)
    assert (built.unit_numels()["blocks.0"], built.unit_numels()["blocks.2"]) == (2 * BLOCK, BLOCK)
    hash(built)


def test_what_merged_blocks_share_belongs_to_their_unit_and_counts_once():
    model = meta(Llama, tied=True)
    model.blocks[1].qkv = model.blocks[0].qkv
    policy = policy_of(config(), {"reduce_bucket_size": 2 * BLOCK - 3 * 32 * 32})
    built = zeroamp.build_plan(model, policy)
    assert built.units == ("blocks.0", "blocks.2")
    assert "blocks.0.qkv.weight" in groups(built)["blocks.0"]


def test_units_around_others_children_of_two_parents_and_blocks_used_twice_are_not_merged():
    model = meta(Llama, tied=True)
    names, joined = merged(model, 10**9, {"Block", "RMSNorm"})
    # norm1 and norm2 are siblings, the blocks contain units, and the root's norm has no sibling.
    assert joined == {f"blocks.{i}.norm1": (f"blocks.{i}.norm1", f"blocks.{i}.norm2") for i in range(3)}
    assert len(names) == 3 + 3 + 1
    assert names.index("blocks.0.norm1") < names.index("blocks.0")
    assert merged(model, 10**9, leaf_modules={"names": ["blocks.1.norm1"]})[1] == {}
    model.blocks.append(model.blocks[0])
    assert merged(model, 10**9)[1] == {"blocks.1": ("blocks.1", "blocks.2")}


def _of_linears(*widths, table=0):
    """A model of square Linears of these widths, one unit each, beside an embedding of `table` elements."""
    model = meta(nn.Module)
    model.blocks = nn.ModuleList(nn.Linear(width, width, bias=False, device="meta") for width in widths)
    if table:
        model.table = nn.Embedding(table // 32, 32, device="meta")
    return model


@pytest.mark.parametrize(
    ("widths", "table", "stage", "units"),
    [
        ([1000] * 6, 0, 0, [4, 2]),
        ([1000] * 6, 0, 1, [4, 2]),
        ([1000] * 6, 0, 2, [4, 2]),
        ([1000, 1000, 2001, 1000], 0, 2, [2, 1, 1]),  # a larger unit is left as it is
        ([1500] * 3, 0, 2, [1, 1, 1]),  # two do not fit
        ([1000] * 6, 0, 3, [1] * 6),  # equal units are not small beside each other
        ([1000] * 6, 16 * 2_000_000, 3, [2, 2, 2]),
        ([1000] * 6, 16 * 2_000_000 - 32, 3, [1] * 6),
        ([1000] * 6, 16 * 9_000_000, 3, [4, 2]),
        ([100, 100, 1000, 100, 100], 0, 3, [2, 1, 2]),
    ],
)
def test_small_units_are_merged_by_default(widths, table, stage, units):
    names, joined = merged(_of_linears(*widths, table=table), None, {"Linear"}, stage=stage)
    blocks = [name for name in names if name.startswith("blocks")]
    assert sorted(len(joined.get(name, (name,))) for name in blocks) == sorted(units)


def test_the_default_is_no_number_and_0_merges_nothing():
    policy = zeroamp.policy_from_config({"zero_optimization": {"stage": 2}})
    assert policy.reduce_bucket_size is None
    assert zeroamp.policy_from_config(policy.to_config()) == policy
    assert merged(_of_linears(8, 8), 0, {"Linear"}, stage=2)[1] == {}


def test_nothing_warns_of_what_is_merged_by_default(caplog):
    model = meta(Llama, tied=False)
    model.embed = nn.Embedding(20_000, 32, device="meta")
    assert len(merged(model, None)[1]) == 1
    assert caplog.messages == []


def test_leaf_modules_are_not_merged():
    leaf = {"names": ["blocks.1"]}
    assert merged(meta(Llama, tied=True, num_blocks=4), 10**9, leaf_modules=leaf)[1] == {
        "blocks.2": ("blocks.2", "blocks.3")
    }


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        ({"stage": 3, "reduce_bucket_size": 5e8}, "zero_optimization.reduce_bucket_size leaves"),
        ({"stage": 3, "stage3_max_live_parameters": 1e9}, "zero_optimization.stage3_max_live_parameters leaves"),
        ({"stage": 2, "reduce_bucket_size": 5e8, "stage3_max_live_parameters": 1e9}, None),
        ({"stage": 3, "reduce_bucket_size": 12_000, "stage3_max_live_parameters": 12_000}, None),
    ],
)
def test_options_that_leave_little_of_stage_3_are_warned_about(caplog, zero, words):
    cfg = {"torch_autocast": {"enabled": True, "dtype": "bf16"}, "zero_optimization": zero}
    zeroamp.build_plan(Llama(tied=True), zeroamp.policy_from_config(cfg))
    assert [message.startswith(words or "?") for message in caplog.messages] == ([True] if words else [])

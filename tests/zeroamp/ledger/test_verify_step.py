"""`Ledger.verify`: passes for what the config asks for, and names the parameter where one dtype was tampered with."""

import json
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import zeroamp
from tests.models.small import ThreeUnits, batch, build
from tests.processes.ranks import RankError
from tests.processes.training import config, wrapped
from tests.selection import slow_but
from zeroamp.accumulation.shard_accumulator import RoundedSum
from zeroamp.hooks._torch.fsdp import groups_of
from zeroamp.ledger.dtype_differences import find_differences
from zeroamp.planning.mesh import Ranks
from zeroamp.wrapping.state import wrap_state

BF16, FP32 = torch.bfloat16, torch.float32
LOW = {"dtype": None, "bf16": {"enabled": True}}
LOW_SUMS = {"data_types": {"grad_accum_dtype": "bf16"}}


def arguments(name, index=0):
    inputs = batch(name, index)
    return {"input_ids": inputs, "labels": inputs} if name == "hf_llama" else inputs


def verify(model, name):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    return zeroamp.explain(model).verify(model, arguments(name, dist.get_rank()), optimizer=optimizer)


def _of_options(name, options, fields=None, mesh_shape=None):
    return verify(wrapped(name, config(**options), fields=fields, mesh_shape=mesh_shape), name).to_dict()


CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hf_llama", {"stage": 0, "accumulation": 1, **LOW_SUMS}),
        ("moe", {"stage": 2, "accumulation": 3, **LOW_SUMS}),
        ("conv", {"stage": 2, "zeroamp": {"reduce_accumulate_dtype": "native"}}),
        ("hf_llama", {"stage": 2, "dtype": None, "fp16": {"enabled": True, "initial_scale_power": 4}}),
        ("conv", {"stage": 3, "comm": "fp32"}),
        ("moe", {"stage": 3, "dtype": "float16", "accumulation": 2}),
        ("moe", {"zero_optimization": {"stage": 3, "offload_param": CPU, "offload_optimizer": CPU}}),
        (
            "moe",
            {
                **LOW,
                "accumulation": 2,
                "data_types": {"keep_in_fp32_modules": ["router", "norm", "blocks.0.experts"], "buffer_dtype": "fp32"},
            },
        ),
    ],
    ids=str,
)
def test_every_option_keeps_what_the_ledger_promises(ranks2, name, options):
    seen = ranks2.run(_of_options, name, options)[0]
    assert seen["is_traffic_as_planned"]
    assert seen["num_micro_batches"] == options.get("accumulation", 1)
    for row in seen["groups"]:
        for boundary in ("stored", "param", "compute", "gradient", "communication", "accumulate", "optimizer"):
            promised, observed = row["expected"][boundary], row["observed"][boundary]
            assert observed == [promised] or (promised == "per op" and observed), (row["group"], boundary)


def _of_auto():
    block = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": "auto"}
    policy = zeroamp.policy_from_config(config(3, dtype=None, torch_autocast=block))
    model = zeroamp.wrap_model(build("encoder"), policy, example_inputs=batch("encoder", 0))
    seen = verify(model, "encoder").to_dict()
    return {row["parameter"]: row["observed"]["compute"] for row in seen["parameters"]}


def test_safe_parameters_that_a_run_found_compute_low(ranks2):
    seen = ranks2.run(_of_auto)[0]
    assert seen["encoder.layers.0.self_attn.in_proj_weight"] == ["bf16"], "no Linear's, and autocast casts it"
    assert seen["encoder.layers.0.norm1.weight"] == ["fp32"]


@pytest.mark.parametrize(
    "fields", slow_but([{"hpz_partition_size": 2}, {"prefetch_bucket_size": 10**9}], {"hpz_partition_size": 2}), ids=str
)
def test_sharding_options_and_replicas(ranks4, fields):
    options = {"stage": 3, "threshold": 0, "accumulation": 2}
    seen = ranks4.run(_of_options, "moe", options, fields, (2, 2))[0]
    assert seen["is_traffic_as_planned"]
    low = next(row for row in seen["groups"] if row["group"] == "blocks.0")
    assert (low["expected"]["communication"], low["expected"]["replicas"]) == ("bf16", "fp32")
    assert low["observed"]["replicas"] == ["fp32"]


def _set_policy(model, **fields):
    """Replace the mixed-precision policy of block 1's own group, before its first forward."""
    (group,) = groups_of(model.blocks[1]._get_fsdp_state())
    group.mp_policy = MixedPrecisionPolicy(**fields)
    for parameter in group.fsdp_params:
        parameter.mp_policy = group.mp_policy  # where newer versions read it


def cast_storage(model):
    for linear in (model.blocks[1].qkv, model.blocks[1].out, model.blocks[1].gate_up, model.blocks[1].down):
        linear.to(BF16)


def upcast_in_forward(model):
    linear = model.blocks[1].qkv
    linear.forward = lambda x: F.linear(x.float(), linear.weight.float()).to(x.dtype)


def cast_gradient(model):
    """As one may from torch 2.11 on. (A hook that returns another dtype is refused by autograd.)"""

    block = model.blocks[1]

    def after(_module, _args, output):
        gathered = [p for module in block.modules() if isinstance(module, nn.Linear) for p in module.parameters()]

        def cast(_gradient):  # in backward, because newer FSDP2 sets it at its start
            for parameter in gathered:
                parameter.grad_dtype = FP32

        output.register_hook(cast)

    block.down.register_forward_hook(after)


def _set_reduction(model, dtype, index=1):
    """Replace the dtypes in which the gradients of a block are communicated and summed."""
    comm = groups_of(model.blocks[index]._get_fsdp_state())[0]._reduce_scatter_comm
    comm.communication_dtype, comm.reduce_dtype, comm.collective = dtype, dtype, "reduce_scatter"


def sum_sharded_in_fp16(model):
    accumulator = wrap_state(model).step.shard_accumulator
    take = accumulator._take
    low = {id(parameter) for parameter in model.blocks[1].qkv.parameters()}

    def take_one(parameter):
        accumulator._new_sum = partial(RoundedSum, torch.float16 if id(parameter) in low else BF16)
        take(parameter)

    accumulator._take = take_one


def update_in_bf16(model):
    """A state in bf16 for the one parameter of 80 rows, which 2 ranks share."""

    class Rounding(torch.optim.AdamW):
        def step(self, closure=None):
            super().step(closure)
            for parameter, state in self.state.items():
                if parameter.shape[0] * dist.get_world_size() == 80:  # a copy of the shard
                    state["exp_avg"] = state["exp_avg"].bfloat16()

    torch.optim.AdamW = Rounding


def _tampered(tamper, options, mesh_shape=None, ranks=(0, 1, 2, 3)):
    original = torch.optim.AdamW
    model = wrapped("llama_tied", config(**options), mesh_shape=mesh_shape)
    if dist.get_rank() in ranks:
        tamper(model)
    try:
        verify(model, "llama_tied")
    except zeroamp.PrecisionError as error:
        return str(error)
    finally:
        torch.optim.AdamW = original
    return None


QKV = "blocks.1.qkv.weight of Linear (blocks.1.qkv)"
GATHERED_IN_FP32 = partial(_set_policy, param_dtype=FP32, reduce_dtype=FP32)
REDUCED_IN_FP32 = partial(_set_reduction, dtype=FP32)
SUMMED_IN_BF16 = partial(_set_policy, param_dtype=BF16, reduce_dtype=BF16)
TAMPERINGS = [
    (cast_storage, {}, (QKV, "stored must be fp32", "bf16 (the shard)")),
    (GATHERED_IN_FP32, {}, (QKV, "param must be bf16", "fp32 (the forward of blocks.1)")),
    (upcast_in_forward, LOW, (QKV, "compute must be bf16", "fp32 (aten.mm)")),
    (cast_gradient, {}, (QKV, "gradient must be bf16", "fp32 (backward)")),
    (REDUCED_IN_FP32, {}, (QKV, "communication must be bf16", "fp32 (reduce_scatter of blocks.1)")),
    (SUMMED_IN_BF16, {"stage": 1, "accumulation": 2}, (QKV, "accumulate must be", "bf16 (the unsharded sum)")),
    (
        sum_sharded_in_fp16,
        {"stage": 2, "accumulation": 2, **LOW_SUMS},
        (QKV, "accumulate must be bf16", "fp16 (the sharded sum)"),
    ),
    (update_in_bf16, {}, ("embed.weight of Embedding (embed)", "optimizer must be fp32", "bf16 (Rounding's exp_avg)")),
]


@pytest.mark.parametrize(("tamper", "options", "parts"), TAMPERINGS, ids=[parts[1] for *_, parts in TAMPERINGS])
def test_one_wrong_dtype_names_parameter_module_and_boundary(ranks2, tamper, options, parts):
    """One dtype that is not the expected one names parameter module and boundary."""
    for message in ranks2.run(_tampered, tamper, {"stage": 3, **options}):
        assert message is not None
        assert any(all(part in line for part in parts) for line in message.splitlines())
        assert all(line.startswith((parts[0].split(".")[0], "…")) for line in message.splitlines())
        assert "blocks.0" not in message
        assert "blocks.2" not in message


def test_the_average_over_replicas(ranks4):
    for message in ranks4.run(_tampered, partial(_set_reduction, dtype=BF16), {"stage": 3}, (2, 2)):
        assert f"{QKV}: replicas must be fp32, but is bf16 (all_reduce of blocks.1)" in message


def test_a_difference_on_one_rank_is_raised_on_all(ranks2):
    for tamper, options in ((upcast_in_forward, LOW), (update_in_bf16, {})):
        first, second = ranks2.run(_tampered, tamper, {"stage": 3, **options}, None, (1,))
        assert first == second
        assert first.startswith("Ledger.verify failed on rank 1: ")


def _many():
    model = wrapped("llama_tied", config(3))
    for index in range(3):
        _set_reduction(model, FP32, index)
    verify(model, "llama_tied")


def test_of_many_differences_eight_are_listed(ranks2):
    with pytest.raises(RankError, match=r"PrecisionError: blocks\.0\.qkv") as caught:
        ranks2.run(_many)
    text = str(caught.value)
    assert text.count("(reduce_scatter of") == 2 * 8
    assert "… and 7 more" in text


def _shown(options):
    model = wrapped("llama_tied", config(**options))
    verification = verify(model, "llama_tied")
    assert isinstance(verification, zeroamp.Verification)
    as_dict = verification.to_dict()
    assert json.loads(json.dumps(as_dict, allow_nan=False)) == as_dict
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "120")
        return str(verification), as_dict


def test_a_table_of_promised_and_seen_per_group(ranks2):
    text, as_dict = ranks2.run(_shown, {"stage": 3, "accumulation": 2})[0]
    lines = text.splitlines()
    assert lines[0] == "zeroamp: 23 parameters, 2 micro-batches: every dtype is the expected one"
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    low = ["fp32", "bf16", "bf16", "bf16", "bf16", "fp32", "fp32"]
    root, seen, *blocks = cells[next(index for index, line in enumerate(lines) if line.startswith("---")) + 1 :]
    assert blocks[:2] == [["blocks.0 … blocks.2", "3", what, *low] for what in ("expected", "observed")]
    assert root[5] == "per op"
    assert seen[5] == "bf16, fp32"  # the tied weight: head and embedding
    assert "replicas" not in text
    assert lines[-1] == "Collectives and their bytes are as planned."
    embed = as_dict["parameters"][0]
    assert (embed["parameter"], embed["group"]) == ("embed.weight", "root")
    assert (embed["expected"]["compute"], embed["observed"]["compute"]) == ("per op", ["bf16", "fp32"])


class Quantized(nn.Module):
    """A frozen int8 weight that its module makes a matrix of, and a frozen bf16 one."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randint(-9, 9, (8, 8), dtype=torch.int8), requires_grad=False)
        self.stored = nn.Parameter(torch.randn(8, 8).bfloat16(), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return ((x @ (self.codes.float() * self.scale)) @ self.stored.float()).square().mean()


def _quantized():
    torch.manual_seed(0)
    model = zeroamp.wrap_model(Quantized(), zeroamp.policy_from_config(config(3, dtype=None)))
    seen = zeroamp.explain(model).verify(model, torch.ones(2, 8)).to_dict()
    return {row["parameter"]: (row["expected"]["compute"], row["observed"]["compute"]) for row in seen["parameters"]}


def test_what_a_module_makes_of_frozen_parameters_passes(ranks2):
    """What a module makes of frozen parameters of other dtypes is its own business."""
    expected = {"codes": ("per op", ["fp32"]), "stored": ("per op", ["fp32"]), "scale": ("fp32", ["fp32"])}
    assert ranks2.run(_quantized)[0] == expected


class Reversed(ThreeUnits):
    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return x.square().mean()


def _other_order():
    cfg = config(3, dtype=None, accumulation=1)
    torch.manual_seed(0)
    policy = zeroamp.policy_from_config({**cfg, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 72}})
    model = zeroamp.wrap_model(Reversed(), policy)
    return str(zeroamp.explain(model).verify(model, torch.ones(2, 8)))


def test_another_order_than_the_registered_one_is_told_not_raised(ranks2):
    assert ranks2.run(_other_order)[0].endswith("not as planned: modules run in another order.")


def _compiled():
    model = wrapped("llama_tied", config(3, threshold=0))
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    return verify(model, "llama_tied").to_dict()


def test_compiled_blocks_are_looked_at_too(ranks2):
    seen = ranks2.run(_compiled)[0]
    assert all(row["observed"]["compute"] for row in seen["groups"])


class CastsToWeightDtype(nn.Module):
    """As BLIP-2 does: the embedding is cast to the dtype of the projection's weight before the sum."""

    def __init__(self, *, sums_outside):
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.position = nn.Parameter(torch.randn(8))
        self.sums_outside = sums_outside

    def forward(self, x):
        dtype = self.proj.weight.dtype
        if not self.sums_outside:  # as CLIP and T5 do: autocast makes the same cast for the Linear
            return self.proj(x.to(dtype)).square().mean()
        return (self.proj(x.to(dtype)).to(dtype) + self.position.to(dtype)).square().mean()


def _casts(sums_outside, zeroamp_keys, safe, factor=1.0):
    torch.manual_seed(0)
    cfg = config(3, zeroamp=zeroamp_keys)
    cfg["torch_autocast"]["lower_precision_safe_modules"] = safe
    model = zeroamp.wrap_model(
        CastsToWeightDtype(sums_outside=sums_outside),
        zeroamp.policy_from_config(cfg),
        example_inputs=(torch.ones(2, 8),),
    )
    try:
        zeroamp.explain(model).verify(model, torch.randn(2, 8) * factor)
    except zeroamp.PrecisionError as error:
        return str(error)
    return "as under autocast"


@pytest.mark.parametrize(
    ("sums_outside", "keys", "safe", "answer"),
    [
        (False, {}, ["torch.nn.Linear"], "as under autocast"),
        (True, {}, ["torch.nn.Linear"], "proj.weight: the model reads the dtype of this weight, which is bf16 here"),
        (True, {"overrides": [{"modules": ["proj"], "param": "fp32"}]}, ["torch.nn.Linear"], "as under autocast"),
        (True, {}, "auto", "as under autocast"),
    ],
)
def test_a_weight_whose_dtype_is_read_is_named(ranks2, sums_outside, keys, safe, answer):
    """A weight whose dtype the model reads is named if the output differs."""
    for text in ranks2.run(_casts, sums_outside, keys, safe):
        assert answer in text


class ReadsDtypeOfUnit(nn.Module):
    """As DINOv3 does: the root computes positions in the dtype of a weight of a unit that has not run yet."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8))])

    def forward(self, x):
        position = torch.arange(8, device=x.device).to(self.blocks[0][0].weight.dtype) / 7
        return (self.blocks[0](x) + position.float()).square().mean()


def _reads_dtype_of_unit(stage, safe):
    torch.manual_seed(0)
    cfg = config(stage)
    cfg["torch_autocast"]["lower_precision_safe_modules"] = safe
    policy = zeroamp.policy_from_config(cfg)
    model = zeroamp.wrap_model(
        ReadsDtypeOfUnit(), policy, auto_wrap_policy={"Sequential"}, example_inputs=(torch.ones(2, 8),)
    )
    try:
        zeroamp.explain(model).verify(model, torch.randn(2, 8))
    except zeroamp.PrecisionError as error:
        return str(error)
    return "as under autocast"


def test_a_weight_whose_dtype_is_read_while_sharded_is_named(ranks2):
    for text in ranks2.run(_reads_dtype_of_unit, 2, ["torch.nn.Linear"]):
        assert text.startswith("blocks.0.0.weight: the model reads the dtype of this weight outside of its unit.")
    assert set(ranks2.run(_reads_dtype_of_unit, 2, "auto")) == {"as under autocast"}
    assert set(ranks2.run(_reads_dtype_of_unit, 3, ["torch.nn.Linear"])) == {"as under autocast"}


class ReturnsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        return self.proj(x), self.proj.weight


def _returns_weight():
    torch.manual_seed(0)
    cfg = config(2)
    cfg["torch_autocast"]["lower_precision_safe_modules"] = ["torch.nn.Linear"]
    model = zeroamp.wrap_model(ReturnsWeight(), zeroamp.policy_from_config(cfg))
    zeroamp.explain(model).verify(model, torch.randn(2, 8), loss_fn=lambda output: output[0].square().mean())
    return "as under autocast"


def test_a_weight_of_which_only_zeroamp_reads_the_dtype_is_not_named(ranks2):
    """The cast of outputs to fp32 reads the dtype of each output, also of one that is a weight."""
    assert ranks2.run(_returns_weight) == ["as under autocast"] * 2


def test_an_output_of_nan_is_no_difference(ranks2):
    assert ranks2.run(_casts, False, {}, ["torch.nn.Linear"], math.nan) == ["as under autocast"] * 2


def test_a_gradient_of_a_frozen_parameter_is_a_difference():
    plan = zeroamp.build_plan(nn.Linear(8, 8).requires_grad_(False), zeroamp.policy_from_config(config(3)))
    observed = {"weight": {"gradient": {"bf16": "backward"}}, "bias": {}}
    (difference,) = find_differences(plan, Ranks(num_shards=2), observed)
    assert "weight of Linear (the root): gradient must be none, because it is frozen, but is bf16" in str(difference)

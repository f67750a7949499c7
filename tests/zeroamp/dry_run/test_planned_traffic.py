"""What is planned to move in a step is what the counters count: calls and bytes per collective, dtype and group."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroamp
from tests.measuring.traffic import planned_and_counted
from tests.models.small import ConvNet, Llama, ThreeUnits, batch, build
from tests.processes.training import config, policy, wrapped
from tests.selection import slow_but
from zeroamp.dry_run.planned_traffic import plan_traffic
from zeroamp.planning.mesh import Ranks

BLOCK = 10_272 + 64  # elements of one of the three blocks of the LLaMA
NATIVE = {"zeroamp": {"reduce_accumulate_dtype": "native"}}
LOW = {"dtype": None, "bf16": {"enabled": True}}


def _of_model(name, options, fields, mesh_shape=None, prepare=None):
    model = wrapped(name, config(**options), mesh_shape=mesh_shape, fields=fields, prepare_before=prepare)
    return planned_and_counted(model, batch(name, 0))


def check(answers):
    for planned, counted in answers:
        assert planned == counted
        assert len(counted) > 2


MODES = [{}, {"comm": "fp32"}, {**LOW, **NATIVE}]


@pytest.mark.parametrize("mode", slow_but(MODES, {}), ids=str)
def test_every_mode_and_stage(ranks2, mode):
    for stage, threshold in ((0, None), (1, None), (2, 0), (3, None), (3, 0)):
        options = {"stage": stage, "accumulation": 3, "threshold": threshold, **mode}
        check(ranks2.run(_of_model, "llama_tied", options, {}))


@pytest.mark.parametrize("name", ["moe", "odd_rows"])
def test_every_model_with_sizes_that_the_ranks_do_not_divide(ranks2, name):
    for stage, accumulation in ((0, 2), (2, 2), (3, 1)):
        options = {"stage": stage, "accumulation": accumulation, "threshold": 0}
        check(ranks2.run(_of_model, name, options, {}))


def _freeze_some(model):
    for block in model.blocks:
        block.qkv.requires_grad_(False)
        block.norm1.requires_grad_(False)


def _store_low(model):
    model.blocks[1].qkv.requires_grad_(False).to(torch.bfloat16)


@pytest.mark.parametrize("prepare", slow_but([_freeze_some, _store_low], _freeze_some))
def test_frozen_parameters(ranks2, prepare):
    for stage, accumulation, bucket in ((1, 2, 0), (3, 2, BLOCK)):
        options = {"stage": stage, "accumulation": accumulation, "threshold": 0}
        check(ranks2.run(_of_model, "llama_untied", options, {"prefetch_bucket_size": bucket}, None, prepare))


FIELDS = [{"max_live_parameters": BLOCK}, {"max_live_parameters": BLOCK, "prefetch_bucket_size": 3 * BLOCK}]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_sharding_options(ranks2, fields):
    for accumulation, threshold in ((1, None), (2, 0)):
        options = {"stage": 3, "threshold": threshold, "accumulation": accumulation}
        check(ranks2.run(_of_model, "llama_untied", options, fields))


@pytest.mark.parametrize(
    ("options", "fields", "mesh_shape"),
    [
        ({"stage": 3}, {}, (2, 2)),
        ({"stage": 3, "threshold": 0}, {"hpz_partition_size": 2}, None),
    ],
    ids=str,
)
def test_hybrid_sharding_and_a_secondary_partition(ranks4, options, fields, mesh_shape):
    check(ranks4.run(_of_model, "conv", {"accumulation": 2, **options}, fields, mesh_shape))


class Repeated(nn.Module):
    """Units in units, one that runs three times, and a root that owns nothing."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))) for _ in range(2))
        shared = nn.Sequential(nn.Linear(8, 8))
        self.shared = nn.ModuleList([shared, shared, shared])

    def forward(self, x):
        for layer in (*self.layers, *self.shared):
            x = layer(x)
        return x.square().mean()


def _of_class(cls, stage, accumulation, fields, wrap, dtype=None):
    torch.manual_seed(0)
    cfg = config(stage, dtype=dtype, accumulation=accumulation)
    return planned_and_counted(zeroamp.wrap_model(cls(), policy(cfg, fields), auto_wrap_policy=wrap), torch.ones(2, 8))


# The root owns nothing: the record of forwards then costs a gather, see the replay's note.
@pytest.mark.parametrize("cls", [ThreeUnits, Repeated])
@pytest.mark.parametrize(
    "fields", slow_but([{}, {"max_live_parameters": 150}, {"prefetch_bucket_size": 150}], {}), ids=str
)
def test_units_in_units_units_that_run_again_and_a_root_without_parameters(ranks2, cls, fields):
    wrap = {"Linear"} if cls is ThreeUnits else {"Sequential"}
    for stage, accumulation in ((0, 2), (2, 1), (3, 3)):
        check(ranks2.run(_of_class, cls, stage, accumulation, fields, wrap))


def _in_one_rank(stage):
    model = build("conv")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    model = zeroamp.wrap_model(model, zeroamp.policy_from_config(config(stage)), mesh, {"Sequential"})
    return planned_and_counted(model, batch("conv", 0))


def test_one_rank_alone_moves_nothing_but_the_statistics(ranks2):
    num_parameters = len(list(build("conv").parameters()))
    num_bytes = 8 * (2 + num_parameters)
    for planned, counted in ranks2.run(_in_one_rank, 3):
        assert planned == counted == {("all_reduce", "torch.float64", "step"): (1, num_bytes)}


def _meta_plan(cls, options, wrap=None):
    with torch.device("meta"):
        model = cls()
    return zeroamp.build_plan(model, zeroamp.policy_from_config(config(**options)), wrap)


def test_without_the_number_of_ranks_bytes_are_those_without_padding():
    plan = _meta_plan(lambda: Llama(tied=False), {"stage": 3})
    known, unknown = plan_traffic(plan, Ranks(num_shards=2)), plan_traffic(plan, Ranks())
    assert (known.calls, known.num_bytes) == (unknown.calls, unknown.num_bytes), "2 divides every size"
    plan = _meta_plan(ConvNet, {"stage": 3}, {"Sequential"})
    known, unknown = plan_traffic(plan, Ranks(num_shards=2)), plan_traffic(plan, Ranks())
    assert known.calls == unknown.calls
    key = ("all_gather", torch.bfloat16, "stages.0")
    padded = 10 * 3 * 9 + 10 + 10 * 9 * 9 + 10  # Conv2d(3, 9) and Conv2d(9, 9): 9 rows are padded to 10
    assert (unknown.num_bytes[key], known.num_bytes[key]) == (2 * 2 * (9 * 27 + 9 + 9 * 81 + 9), 2 * 2 * padded)

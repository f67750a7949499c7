"""torch's pipeline schedules train parts of a wrapped model as one process trains the whole one."""

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.processes import pipelines
from tests.zeroamp.pipelines.comparison import BOUND, DATA, LR, STEPS, check, config, expected, needs

SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
REPLICAS = {"pp": 2, "dp_replicate": 2, "dp_shard": 2}
FAST = [
    ("GPipe", 3, "bf16", {"pp": 4, "dp": 1}),
    ("1F1B", 0, "bf16", DATA),
    ("1F1B", 2, "bf16", DATA),
    ("LoopedBFS", 1, "bf16", DATA),
    ("Interleaved1F1B", 3, "bf16", DATA),
    ("InterleavedZeroBubble", 3, "fp32", DATA),
    ("ZBVZeroBubble", 2, "bf16", DATA),
    ("ZBVZeroBubble", 3, "bf16", DATA),
    ("DualPipeV", 3, "bf16", DATA),
]
SLOW = (
    *((name, 3, "autocast", DATA) for name in SCHEDULES),
    *((name, 3, "bf16", DATA) for name in ("GPipe", "InterleavedZeroBubble")),
    *(("1F1B", stage, "autocast", REPLICAS) for stage in (2, 3)),
    ("ZBVZeroBubble", 2, "bf16", REPLICAS),
)
MOST_GATHERS = {("1F1B", 2): 1, ("ZBVZeroBubble", 2): 1, ("ZBVZeroBubble", 3): 5}
"""Of a group in an optimizer step. At stage 3 they are for the forwards and backwards of micro-batches."""


@pytest.mark.parametrize(
    ("name", "stage", "mode", "axes"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_schedules_train_as_one_process(request, name, stage, mode, axes):
    """In bf16, each group is also reduced once in an optimizer step, in fp32."""
    needs(name)
    size = torch.Size(axes.values()).numel()
    ranks = request.getfixturevalue(f"ranks{size}")
    runs = ranks.run(pipelines.train, name, config(stage, mode), axes, STEPS, max_norm=1.0, lr=LR)
    num_data = size // axes["pp"]
    check(runs, expected(name, mode, num_data=num_data), num_data, BOUND[mode])
    if mode == "bf16" and axes == DATA and (name, stage) in MOST_GATHERS:
        for run in runs:
            of_groups = {key: number for key, number in run.calls.items() if key[3] != "step" and number}
            gathers = {key: number for key, number in of_groups.items() if key[1] == "all_gather"}
            assert {dtype for _, _, dtype, _ in of_groups.keys() - gathers.keys()} == {"torch.float32"}
            assert len(of_groups) == 2 * len(gathers)
            assert {number for key, number in of_groups.items() if key not in gathers} == {1}
            assert max(gathers.values()) == MOST_GATHERS[name, stage]


@pytest.mark.parametrize(("name", "mode"), [("1F1B", "autocast"), ("ZBVZeroBubble", "fp32")])
def test_tied_weights_of_two_stages_are_trained_as_one(ranks4, name, mode):
    """The norm counts the sum of both copies once. On a V, one rank has both copies."""
    needs(name)
    axes = {"pp": 2, "dp": 2}
    runs = ranks4.run(pipelines.train, name, config(3, mode), axes, STEPS, max_norm=1.0, lr=LR, tied=True)
    check(runs, expected(name, mode, tied=True), 2, BOUND["fp32"])


def test_small_parameters_of_the_whole_part_are_one_group(ranks4):
    """Weights and biases below the threshold are summed in one group, which the schedule reduces too."""
    needs("ZBVZeroBubble")
    cfg, axes = config(3, "autocast", threshold=100_000), {"pp": 2, "dp": 2}
    runs = ranks4.run(pipelines.train, "ZBVZeroBubble", cfg, axes, STEPS, max_norm=1.0, lr=LR)
    check(runs, expected("ZBVZeroBubble", "autocast"), 2, BOUND["autocast"])


@pytest.mark.parametrize("stage", [2, 3])
def test_fsdp2_alone_loses_or_rounds_gradients_of_zero_bubble_schedules(ranks4, stage):
    """The errors that docs/from-fsdp2.md names. If this test fails, torch has mended them: see backward_by_parts.py."""
    needs("ZBVZeroBubble")
    runs = [
        ranks4.run(pipelines.gradients, "ZBVZeroBubble", config(stage, "bf16"), *wrap)
        for wrap in ((), (pipelines.fully_sharded,))
    ]
    lost, differences = set(), []
    for ours, plain in zip(*runs, strict=True):
        for fqn, gradient in ours.items():
            if plain[fqn] is None:
                lost.add(fqn)
            else:
                difference = torch.linalg.vector_norm(plain[fqn] - gradient) / torch.linalg.vector_norm(gradient)
                differences.append(difference.item())
    if stage == 3:
        assert "head.weight" in lost
        assert max(differences) > 0.1
    else:
        assert not lost
        rounds = torch.__version__ < (2, 15)
        assert 5e-4 < max(differences) < 5e-3 if rounds else max(differences) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_a_tensor_axis_beside_the_stages(ranks8, name):
    """The norm counts the copies on tensor ranks once, and the schedule reduces parts of weights over data ranks."""
    needs(name)
    runs = ranks8.run(_tensor_parallel, name)
    for of_tensor_rank in (runs[::2], runs[1::2]):
        check(of_tensor_rank, expected(name, "fp32"), 2, 1e-6)


def _tensor_parallel(name):
    axes = {"pp": 2, "dp": 2, "tp": 2}
    return pipelines.train(name, config(2, "fp32"), axes, STEPS, max_norm=1.0, lr=LR, edit=_parallelized)


@pytest.mark.slow
def test_ranks_of_an_axis_that_a_part_does_not_use_are_copies(ranks8):
    """Only the second stage is parallel over the tensor axis. The norm counts the shards of the first stage once."""
    runs = ranks8.run(_second_stage_parallel)
    for of_tensor_rank in (runs[::2], runs[1::2]):
        check(of_tensor_rank, expected("1F1B", "fp32"), 2, 1e-6)


def _second_stage_parallel():
    return pipelines.train(
        "1F1B", config(2, "fp32"), {"pp": 2, "dp": 2, "tp": 2}, STEPS, max_norm=1.0, lr=LR,
        edit=lambda parts, mesh: _parallelized({i: part for i, part in parts.items() if i == 1}, mesh),
        slices=lambda mesh: mesh["dp", "tp"] if mesh["pp"].get_local_rank() else mesh["dp"],
    )  # fmt: skip


def _parallelized(parts, mesh):
    for part in parts.values():
        for block in part.blocks.values():
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

"""Training in two levels: the bits of the flat reduction, two process groups, and nothing where there is one node."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import zeroamp
from benchmarks.peers.counting import Collectives
from tests.measuring.logs import log_lines
from tests.oracles import one_process
from tests.processes.training import SmallTraining, check_runs, config, train, wrapped
from zeroamp.hooks._torch import process_groups
from zeroamp.wrapping.state import wrap_state

NUM_STEPS = 3
CLIP = 0.5


def _options(per_node, **more):
    return {"zeroamp": {"ranks_per_node": per_node, **more}}


def _runs(per_node, shapes, stages):
    configs = [(shape, stage) for shape in shapes for stage in stages if shape is None or stage > 0]
    cfg = _options(per_node)
    return [train("encoder", config(stage, clip=CLIP, **cfg), NUM_STEPS, mesh_shape=shape) for shape, stage in configs]


@pytest.mark.parametrize(
    ("num_ranks", "per_node", "shapes"),
    [
        (4, 2, [None]),
        pytest.param(8, 2, [None, (2, 4)], marks=pytest.mark.slow),
    ],
)
def test_two_levels_train_to_the_bits_of_the_tree(request, num_ranks, per_node, shapes):
    by_rank = request.getfixturevalue(f"ranks{num_ranks}").run(_runs, per_node, shapes, (0, 1, 2, 3))
    oracle = one_process.train("encoder", world_size=num_ranks, num_steps=NUM_STEPS, clip=CLIP)
    assert {len(runs) for runs in by_rank} == {4 + 3 * (len(shapes) - 1)}
    check_runs(by_rank, oracle)


@dataclass(frozen=True, kw_only=True)
class Wrapped:
    """What one rank saw of wrap_model and of one optimizer step."""

    axes: list[int]
    """In two levels."""
    made: list[list[int]]
    """The ranks of each process group that was made."""
    calls: dict
    """(collective, dtype) -> calls that reached the process group."""
    counted: dict


def _wrapped_with(per_node, mesh_shape=None):
    made, new_group = [], dist.new_group
    process_groups._made.clear()  # those of earlier tests in these processes

    def new_own_group(ranks, **options):
        if dist.get_rank() in ranks:
            made.append(list(ranks))
        return new_group(ranks, **options)

    dist.new_group = distributed_c10d.new_group = new_own_group
    try:
        with log_lines() as lines:
            training = SmallTraining(config(3, **_options(per_node)), name="llama_untied", mesh_shape=mesh_shape)
    finally:
        dist.new_group = distributed_c10d.new_group = new_group
    assert lines == []
    with Collectives() as collectives:
        training.step()
    return Wrapped(
        axes=list(wrap_state(training.model).nodes.by_axis),
        made=made,
        calls=dict(collectives.calls),
        counted=dict(zeroamp.traffic(training.model).calls),
    )


def test_two_process_groups_are_made_for_all_units(ranks4):
    by_rank = ranks4.run(_wrapped_with, 2)
    made = [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]
    assert [found.made for found in by_rank] == made
    ours, flat = by_rank[0], ranks4.run(_wrapped_with, "off")[0]
    assert (ours.axes, flat.axes, flat.made) == ([0], [], [])
    assert ours.counted == flat.counted, "one reduction is counted as one"
    # Inside the node in bf16, between nodes in fp32; twice as many gathers.
    fp32, bf16 = ("all_to_all", torch.float32), ("all_to_all", torch.bfloat16)
    assert ours.calls[bf16] == flat.calls[bf16]
    assert ours.calls[fp32] == 2 * flat.calls[fp32] + flat.calls[bf16]
    assert ours.calls["all_gather", torch.bfloat16] == 2 * flat.calls["all_gather", torch.bfloat16]


def _groups_made_by_a_second_model(stage, options):
    """Process groups that `wrap_model` of a second model makes: a teacher, a critic, the reference of DPO."""
    wrapped("encoder", config(stage, **options))
    before = set(distributed_c10d._world.pg_map)
    wrapped("llama_untied", config(stage, **options))
    return len(set(distributed_c10d._world.pg_map) - before)


@pytest.mark.parametrize(("stage", "options"), [(3, _options(2)), (2, {"zeroamp": {"dp_replicate_size": 2}})])
def test_models_of_a_process_share_their_groups(ranks4, stage, options):
    assert ranks4.run(_groups_made_by_a_second_model, stage, options) == [0] * 4


def _wrapped_after_some_ranks_made_a_group(options, fields):
    dist.new_group([0, 1])  # the program's own: the other two ranks are in one group less
    return SmallTraining(config(3, **options), fields=fields).step().step


@pytest.mark.parametrize(
    ("options", "fields"),
    [(_options(2), {}), ({"threshold": 0}, {"hpz_partition_size": 2})],
)
def test_groups_are_made_beside_those_of_the_program(ranks4, options, fields):
    """Groups are made where the program has made some for a part of the ranks."""
    assert ranks4.run(_wrapped_after_some_ranks_made_a_group, options, fields) == [1] * 4


def test_nothing_is_made_for_an_axis_inside_a_node(ranks4):
    """Nothing is made where an axis is inside a node or has one rank on each."""
    found = ranks4.run(_wrapped_with, 2, (2, 2))[0]
    assert (found.axes, found.made) == ([], [])


def _refused_because_of_the_environment(value, rank):
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setenv("LOCAL_WORLD_SIZE", value)
        with pytest.raises(zeroamp.ZeroAmpError) as error:
            wrapped("encoder", config(3))
        return str(error.value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("two", "the environment variable LOCAL_WORLD_SIZE must be a whole number from 1 on, but is"),
        ("1", "whether one node has all ranks is True on rank 0, but False on rank 1"),
    ],
)
def test_a_wrong_local_world_size_is_an_error_on_all(ranks2, value, text):
    """A malformed or different `LOCAL_WORLD_SIZE` of one rank is an error on all ranks."""
    assert [text in found for found in ranks2.run(_refused_because_of_the_environment, value, 1)] == [True, True]


def test_a_secondary_partition_is_gathered_in_one_level(ranks4):
    cfg = config(3, clip=CLIP, **_options(2))
    by_rank = ranks4.run(train, "encoder", cfg, NUM_STEPS, fields={"hpz_partition_size": 2})
    oracle = one_process.train("encoder", world_size=4, num_steps=NUM_STEPS, clip=CLIP)
    check_runs(by_rank, oracle)

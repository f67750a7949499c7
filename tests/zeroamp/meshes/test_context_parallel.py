"""Context parallelism: each rank of the axis gets a part of each sequence, and gradients are averaged over all."""

import pytest

import zeroamp
from tests.models import parallel
from tests.oracles import whole_model
from tests.processes import parallel_training
from tests.processes.parallel_training import check_close, fp64_norm, mesh_of, reported
from tests.processes.ranks import RankError
from tests.processes.training import config, same_bits
from tests.selection import slow_but

BOUND = 2e-6
"""fp32 has 24 bits. A rank's weight gradients sum the tokens of its part of a sequence, and ranks are summed after: the
order of additions differs. 16 times the rounding of one addition (1.2e-7)."""


def _flattened(mesh):
    return mesh["dp", "cp"]._flatten("dp_cp")


def _slice(mesh):
    return mesh["dp", "cp"]


@pytest.mark.parametrize(
    "options",
    [{}, {"ring": True}, pytest.param({"passed": _flattened}, marks=pytest.mark.slow)],
    ids=["ulysses", "ring", "flattened"],
)
def test_parts_of_sequences_equal_whole_ones(ranks4, options):
    cfg = config(3, dtype=None, clip=0.5, accumulation=2)
    oracle = whole_model.train(parallel.decoder(), parallel.samples, 2, num_data=2, accumulation=2, clip=0.5)
    runs = ranks4.run(parallel_training.train, {"dp": 2, "cp": 2}, cfg, 2, **options)
    check_close(runs[0], oracle, BOUND)
    for other in runs[1:]:
        assert (other.losses, other.norms) == (runs[0].losses, runs[0].norms)


@pytest.mark.parametrize("ring", [False, True], ids=["ulysses", "ring"])
@pytest.mark.parametrize("stage", slow_but([0, 1, 2], 2))
def test_stages_have_the_same_bits(ranks4, ring, stage):
    cfg = config(stage, clip=0.5)
    ours = ranks4.run(parallel_training.train, {"dp": 2, "cp": 2}, cfg, 2, ring=ring)[0]
    theirs = ranks4.run(parallel_training.train, {"dp": 2, "cp": 2}, config(3, clip=0.5), 2, ring=ring)[0]
    assert (ours.losses, ours.norms) == (theirs.losses, theirs.norms)
    assert same_bits(ours.parameters, theirs.parameters) == []
    assert theirs.norms[0] == reported(fp64_norm(theirs.gradients))


def _whole(mesh):
    return mesh


def _batch_sizes(num_data, passed, data="dp"):
    mesh = mesh_of(**{data: 2, "cp": 2})
    cfg = {**config(3), "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    policy = zeroamp.policy_from_config(cfg, world_size=num_data)
    model = zeroamp.wrap_model(parallel.decoder(), policy, passed(mesh))
    return zeroamp.explain(model) is not None


@pytest.mark.parametrize(("passed", "data"), [(_slice, "dp"), (_flattened, "dp"), (_whole, "batch")])
def test_batch_sizes_count_the_data_ranks(ranks4, passed, data):
    assert all(ranks4.run(_batch_sizes, 2, passed, data))


def _refused(fields, passed):
    policy = zeroamp.policy_from_config({**config(3), **fields}, world_size=4)
    zeroamp.wrap_model(parallel.decoder(), policy, passed(mesh_of(dp=2, cp=2)))


def _data_axis(mesh):
    return mesh["dp"]


OF_ALL_RANKS = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("fields", "passed", "text"),
    [
        (OF_ALL_RANKS, _whole, r"ConfigError: train_batch_size .*8 = 2 .* x 2 ranks.*world_size="),
        ({}, _data_axis, r"WrapError: .*the axis 'cp' of 2 ranks, which is not in it.*mesh=mesh\[\"dp\", \"cp\"\]"),
    ],
    ids=["batch sizes of all ranks", "a slice without the axis"],
)
def test_what_leaves_out_the_context_axis_is_refused(ranks4, fields, passed, text):
    with pytest.raises(RankError, match=text):
        ranks4.run(_refused, fields, passed)

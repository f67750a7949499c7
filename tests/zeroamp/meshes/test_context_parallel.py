"""Context parallelism: each rank of the axis gets a part of each sequence, and gradients are averaged over all."""

import pytest
import torch

import zeroamp
from tests.models import parallel
from tests.oracles import whole_model
from tests.processes import parallel_training
from tests.processes.parallel_training import fp64_norm, mesh_of, reported
from tests.processes.ranks import RankError
from tests.processes.training import config, same_bits
from tests.selection import slow_but

BOUND = 2e-6
"""fp32 has 24 bits. A rank's weight gradients sum the tokens of its part of a sequence, and ranks are summed after: the
order of additions differs. 16 times the rounding of one addition (1.2e-7)."""


def check_close(run, oracle, bound=BOUND):
    """Losses, norms and gradients within a relative bound, each gradient by the norm of its difference."""
    differences = {
        fqn: float(torch.linalg.vector_norm(run.gradients[fqn] - expected) / torch.linalg.vector_norm(expected))
        for fqn, expected in oracle.gradients.items()
    }
    assert {fqn: each for fqn, each in differences.items() if each > bound} == {}
    assert run.losses == pytest.approx(oracle.losses, rel=bound)
    assert run.norms == pytest.approx(oracle.norms, rel=bound)


def _flattened(mesh):
    return mesh["dp", "cp"]._flatten("dp_cp")


def _slice(mesh):
    return mesh["dp", "cp"]


@pytest.mark.parametrize("passed", slow_but([None, _flattened], None), ids=["mesh", "flattened"])
def test_ulysses_equals_whole_sequences(ranks4, passed):
    cfg = config(3, dtype=None, clip=0.5, accumulation=2)
    oracle = whole_model.train(parallel.decoder(), parallel.samples, 2, num_data=2, accumulation=2, clip=0.5)
    runs = ranks4.run(parallel_training.train, {"dp": 2, "cp": 2}, cfg, 2, passed=passed)
    check_close(runs[0], oracle)
    for other in runs[1:]:
        assert (other.losses, other.norms) == (runs[0].losses, runs[0].norms)


def test_torchs_ring_equals_whole_sequences(ranks4):
    cfg = config(3, dtype=None, clip=0.5, accumulation=2)
    oracle = whole_model.train(parallel.decoder(), parallel.samples, 2, num_data=2, accumulation=2, clip=0.5)
    runs = ranks4.run(parallel_training.train, {"dp": 2, "cp": 2}, cfg, 2, ring=True)
    check_close(runs[0], oracle)
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


def _batch_sizes_of_all_ranks():
    mesh = mesh_of(dp=2, cp=2)
    cfg = {**config(3), "train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    zeroamp.wrap_model(parallel.decoder(), zeroamp.policy_from_config(cfg, world_size=4), mesh)


def test_batch_sizes_of_all_ranks_are_refused(ranks4):
    with pytest.raises(RankError, match=r"ConfigError: train_batch_size .*8 = 2 .* x 2 ranks.*world_size="):
        ranks4.run(_batch_sizes_of_all_ranks)


def _sliced_without_the_axis():
    zeroamp.wrap_model(parallel.decoder(), zeroamp.policy_from_config(config(3)), mesh_of(dp=2, cp=2)["dp"])


def test_a_slice_without_the_context_axis_is_refused(ranks4):
    with pytest.raises(
        RankError, match=r"WrapError: .*the axis 'cp' of 2 ranks, which is not in it.*mesh=mesh\[\"dp\", \"cp\"\]"
    ):
        ranks4.run(_sliced_without_the_axis)

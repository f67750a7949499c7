"""Which ranks of a mesh have different samples: batch sizes count those, and a slice must have the other axes."""

import pytest

import zeroamp
from tests.models import parallel
from tests.processes.parallel_training import mesh_of, prepared
from tests.processes.ranks import RankError
from tests.processes.training import config


def _whole(mesh):
    return mesh


def _slice(mesh):
    return mesh["dp", "cp"]


def _data_axis(mesh):
    return mesh["dp"]


def _wrap(train_batch_size, axes, passed):
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    cfg = {**config(3), **sizes, "train_batch_size": train_batch_size}
    policy = zeroamp.policy_from_config(cfg, world_size=train_batch_size // 4)
    mesh = mesh_of(**axes)
    model = prepared(mesh, experts=True) if "ep" in axes else parallel.decoder()
    return zeroamp.explain(zeroamp.wrap_model(model, policy, passed(mesh))) is not None


@pytest.mark.parametrize(("passed", "data"), [(_slice, "dp"), (_whole, "batch")])
def test_batch_sizes_count_the_data_ranks(ranks4, passed, data):
    assert all(ranks4.run(_wrap, 8, {data: 2, "cp": 2}, passed))


@pytest.mark.parametrize(
    ("train_batch_size", "axis", "passed", "text"),
    [
        (16, "cp", _whole, r"ConfigError: train_batch_size .*8 = 2 .* x 2 ranks.*world_size="),
        (
            8,
            "cp",
            _data_axis,
            r"the axis 'cp' of 2 ranks, which is not in it.*mesh=mesh\[\"dp\", \"cp\"\]",
        ),
        (8, "ep", _data_axis, r"WrapError: .*the axis 'ep' of 2 ranks, which is not in it"),
    ],
    ids=["batch sizes of all ranks", "a slice without the context axis", "a slice without the expert axis"],
)
def test_what_leaves_out_an_axis_is_refused(ranks4, train_batch_size, axis, passed, text):
    with pytest.raises(RankError, match=text):
        ranks4.run(_wrap, train_batch_size, {"dp": 2, axis: 2}, passed)

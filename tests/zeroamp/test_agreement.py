"""Results of all ranks on all ranks, and the error of one too."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zeroamp
from zeroamp.agreement import Agreement


def _results(shape):
    ranks = Agreement(init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]))
    flags = [ranks.any(dist.get_rank() == 2), ranks.any(False), ranks.all(True), ranks.all(dist.get_rank() == 2)]
    return ranks.rank, ranks.run(dist.get_rank), ranks.on_first(lambda: f"of {dist.get_rank()}"), flags


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_results_and_flags_come_from_all_ranks(ranks4, shape):
    expected = [0, 1, 2, 3], "of 0", [True, False, True, False]
    assert ranks4.run(_results, shape) == [(rank, *expected) for rank in range(4)]


def _errors():
    ranks = Agreement(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    errors = []
    for failing in ({0, 1, 2, 3}, {1, 3}, {0}):
        with pytest.raises(zeroamp.CheckpointError) as raised:
            ranks.run(lambda failing=failing: _fail() if dist.get_rank() in failing else None)
        errors.append((str(raised.value), type(raised.value.__cause__)))
    with pytest.raises(zeroamp.StepError, match="^rank 0: the first$"):
        ranks.on_first(lambda: _refuse("the first"))
    return errors


def _fail():
    raise OSError("no space")


def _refuse(text):
    raise zeroamp.StepError(text)


def test_an_error_is_raised_on_all_ranks_with_those_it_is_from(ranks4):
    by_rank = ranks4.run(_errors)
    texts = ["OSError: no space", "rank 1, 3: OSError: no space", "rank 0: OSError: no space"]
    assert all([text for text, _ in errors] == texts for errors in by_rank)
    assert [cause for _, cause in by_rank[1]] == [OSError, OSError, type(None)]

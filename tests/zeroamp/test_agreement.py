"""Results of all ranks on all ranks, and the error of one too."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zeroamp
from zeroamp.agreement import on_all, on_first, rank_in_mesh


def _results(shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    return rank_in_mesh(mesh), on_all(mesh, dist.get_rank), on_first(mesh, lambda: f"of {dist.get_rank()}")


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1), (1, 4)])
def test_results_come_in_the_order_of_the_mesh(ranks4, shape):
    assert ranks4.run(_results, shape) == [(rank, [0, 1, 2, 3], "of 0") for rank in range(4)]


def _errors():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    texts = []
    for failing in ({0, 1, 2, 3}, {1, 3}, {0}):
        with pytest.raises(zeroamp.CheckpointError) as raised:
            on_all(mesh, lambda failing=failing: _fail() if dist.get_rank() in failing else None)
        texts.append((str(raised.value), type(raised.value.__cause__)))
    with pytest.raises(zeroamp.CheckpointError, match="^On rank 0 of 4: the first$"):
        on_first(mesh, lambda: _refuse("the first"))
    return texts


def _fail():
    raise OSError("no space")


def _refuse(text):
    raise zeroamp.CheckpointError(text)


def test_an_error_is_raised_on_all_ranks_with_those_it_is_from(ranks4):
    by_rank = ranks4.run(_errors)
    assert [text for text, _ in by_rank[0]] == [
        "OSError: no space",
        "On rank 1, 3 of 4: OSError: no space",
        "On rank 0 of 4: OSError: no space",
    ]
    assert all([text for text, _ in rank] == [text for text, _ in by_rank[0]] for rank in by_rank)
    assert [cause for _, cause in by_rank[1]] == [OSError, OSError, type(None)]

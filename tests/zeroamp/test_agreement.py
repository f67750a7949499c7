"""Results of all ranks on all ranks, and the error of one too, with a text that names it."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh

import zeroamp
from tests.ranks import Ranks
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


def _agreement():
    return Agreement(init_device_mesh("cpu", (dist.get_world_size(),)))


def _error_of(action):
    with pytest.raises(zeroamp.CheckpointError) as raised:
        action()
    return str(raised.value)


class _FullDisk(FileSystemWriter):
    def write_data(self, plan, planner):
        raise OSError(28, "No space left on device")


def _torch_checkpoint_on_a_full_disk(path):
    ranks = _agreement()
    kind = _FullDisk if ranks.rank == 1 else FileSystemWriter
    tensors = {"weight": torch.ones(2)}
    return _error_of(lambda: ranks.run(lambda: save(tensors, storage_writer=kind(path), process_group=ranks.group)))


def test_an_error_in_torch_checkpoint_names_rank_and_reason_without_tracebacks(ranks2, tmp_path):
    texts = ranks2.run(_torch_checkpoint_on_a_full_disk, tmp_path)
    assert texts == ["rank 1: OSError: [Errno 28] No space left on device"] * 2


def _the_other_is_killed(raises):
    ranks = _agreement()

    def act():
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if raises:
            raise OSError(28, "No space left on device")

    text = _error_of(lambda: ranks.run(act))
    raise zeroamp.CheckpointError(text)  # a body without an answer would have the test wait for the other rank


@pytest.mark.parametrize("raises", [False, True])
def test_where_a_rank_is_lost_the_error_names_the_collective(raises):
    ranks = Ranks(2)
    with pytest.raises(AssertionError) as raised:
        ranks.run(_the_other_is_killed, raises)
    text = str(raised.value)
    assert "all_gather_object of the 2 ranks that save or load, on rank 0: found " in text
    assert "RuntimeError: " in text.partition("found ")[2]
    assert ("found OSError: [Errno 28]" in text) == raises
    ranks.stop()

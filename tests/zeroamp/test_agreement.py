"""What one rank cannot do is an error of all, with a text that names it."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import Ranks
from zeroamp.agreement import Agreement
from zeroamp.policies.errors import CheckpointError


def _agreement():
    return Agreement(init_device_mesh("cpu", (dist.get_world_size(),)))


def _error_of(action):
    with pytest.raises(CheckpointError) as raised:
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
    raise CheckpointError(text)  # a body without an answer would have the test wait for the other rank


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

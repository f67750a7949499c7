"""What fails on one rank is raised on all ranks, with the texts of those where it failed."""

import os
import signal
from datetime import timedelta
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroamp
from tests.processes import ranks as rank_processes
from tests.processes.ranks import Ranks
from zeroamp import rank_group
from zeroamp.checkpoint.manifest import DamagedCheckpointError
from zeroamp.policies.errors import CheckpointError, StepError
from zeroamp.rank_group import RankGroup

ERRORS = {
    "one of the tree": [None, lambda: StepError("a: found 1")],
    "the same on all": [lambda: StepError("same"), lambda: StepError("same")],
    "two texts": [lambda: DamagedCheckpointError("x"), lambda: DamagedCheckpointError("y")],
    "two classes": [lambda: StepError("x"), lambda: CheckpointError("y")],
    "a foreign one": [lambda: OSError(28, "full"), None],
    "tree and foreign": [lambda: DamagedCheckpointError("x"), lambda: KeyError("k")],
}


def _on_all():
    group, found = RankGroup(init_device_mesh("cpu", (2,))), {}
    for name, errors in ERRORS.items():
        make = errors[group.rank % 2]

        def act(make=make):
            if make is not None:
                raise make()

        try:
            group.run(act)
        except Exception as error:
            found[name] = (type(error), str(error), type(error.__cause__))
    return found, group.run(lambda: group.rank), group.on_first(lambda: [group.rank])


_of_earlier_calls = []


def _share_groups():
    for mesh in (init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["a"]):
        RankGroup.shared(mesh, "saving").run(dist.get_rank)
    RankGroup.shared(init_device_mesh("cpu", (2, 2)), "signals")  # never used
    _of_earlier_calls.append(ref(dist.group.WORLD))


def _destroyed_groups_that_are_left():
    return [group() is not None for group in _of_earlier_calls]


def test_shared_groups_do_not_keep_the_process_groups_that_the_program_destroys(ranks4):
    ranks4.run(_share_groups)
    assert ranks4.run(_destroyed_groups_that_are_left) == [[False]] * 4


def test_errors_of_one_rank_are_raised_on_all_and_results_are_of_all(ranks2):
    for rank, (found, ranks, first) in enumerate(ranks2.run(_on_all)):
        assert (ranks, first) == ([0, 1], [0])
        causes = {name: cause for name, (_, _, cause) in found.items()}
        assert found["one of the tree"][:2] == (StepError, "rank 1: a: found 1")
        assert found["the same on all"][:2] == (StepError, "same")
        assert found["two texts"][:2] == (DamagedCheckpointError, "rank 0: x; rank 1: y")
        assert found["two classes"][:2] == (CheckpointError, "rank 0: x; rank 1: y")
        assert found["a foreign one"][:2] == (CheckpointError, "rank 0: OSError: [Errno 28] full")
        assert found["tree and foreign"][:2] == (CheckpointError, "rank 0: x; rank 1: KeyError: 'k'")
        assert causes["a foreign one"] is (OSError if rank == 0 else type(None))


def _error_of(action):
    with pytest.raises(zeroamp.CheckpointError) as raised:
        action()
    return str(raised.value)


GRACE_S = 5
"""Within which the ranks that are left must have answered."""


def _lost(folder):
    """One rank is killed after the ranks have connected, while another raises. The others note their errors."""
    group = dist.new_group(timeout=timedelta(seconds=6 * GRACE_S))
    ranks, rank = RankGroup(DeviceMesh.from_group(group, "cpu"), "signals"), dist.get_rank()
    ranks.run(dist.get_rank)

    def act():
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            raise OSError(28, "No space left on device")

    text = _error_of(lambda: ranks.run(act))
    (folder / str(rank)).write_text(text)
    raise zeroamp.CheckpointError(text)  # a body without an answer would have the test wait for the other ranks


@pytest.mark.slow
def test_all_ranks_learn_of_a_lost_one_at_once_and_what_the_exchange_was_for(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_processes, "GRACE_S", GRACE_S)
    ranks = Ranks(4)
    with pytest.raises(AssertionError):
        ranks.run(_lost, tmp_path)
    ranks.stop()
    for rank in (0, 2, 3):
        text = (tmp_path / str(rank)).read_text()
        assert f"An exchange between the 4 ranks for signals failed on rank {rank}: " in text
        assert "A rank is lost, or did not answer" in text
        assert ("OSError: [Errno 28]" in text) == (rank == 0)
        assert "restart from the last checkpoint" in text


@pytest.mark.parametrize(("minutes", "expected"), [(10, None), (5, timedelta(minutes=5))])
def test_saves_have_gloo_s_default_timeout_where_training_has_nccl_s(monkeypatch, minutes, expected):
    monkeypatch.setattr(rank_group, "timeout_of", lambda *_: timedelta(minutes=minutes))
    monkeypatch.setattr(rank_group, "default_pg_nccl_timeout", timedelta(minutes=10))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    mesh = SimpleNamespace(mesh=torch.tensor([0, 1]), get_group=lambda axis: None, device_type="cuda")
    assert rank_group.RankGroup(mesh)._timeout == expected

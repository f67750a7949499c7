"""What fails on one rank is raised on all ranks, with the texts of those where it failed."""

import itertools
import os
import signal
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroamp
from tests.processes import ranks as rank_processes
from tests.processes.checkpoint_training import Case, Training, differences
from tests.processes.ranks import Ranks
from zeroamp import rank_group
from zeroamp.checkpoint.manifest import DamagedCheckpointError
from zeroamp.policies.errors import CheckpointError, StepError
from zeroamp.rank_group import RankGroup
from zeroamp.wrapping.state import wrap_state

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


def test_errors_of_one_rank_are_raised_on_all(ranks2):
    """Errors of one rank are raised on all and results are of all."""
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
def test_all_ranks_learn_of_a_lost_one_at_once(tmp_path, monkeypatch):
    """All ranks learn of a lost one at once and what the exchange was for."""
    monkeypatch.setattr(rank_processes, "GRACE_S", GRACE_S)
    ranks = Ranks(4)
    with pytest.raises(AssertionError):
        ranks.run(_lost, tmp_path)
    ranks.stop()
    for rank in (0, 2, 3):
        text = (tmp_path / str(rank)).read_text()
        assert text.startswith(f"_lost failed on rank {rank}, in an exchange between the 4 ranks for signals: ")
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


INTERRUPTS = ["in an action", "while it waits"]


@contextmanager
def _interrupt(number, kind):
    """Raise KeyboardInterrupt in exchange `number` of this process, in its action or while it waits for the others."""
    count = itertools.count()
    attempt, wait_for = rank_group.attempt, RankGroup._wait_for

    def attempt_or_interrupt(action):
        if kind == "in an action" and next(count) == number:
            raise KeyboardInterrupt
        return attempt(action)

    def wait_or_interrupt(self, future, *args):
        if kind == "while it waits" and next(count) == number:
            raise KeyboardInterrupt
        return wait_for(self, future, *args)

    with (
        mock.patch.object(rank_group, "attempt", attempt_or_interrupt),
        mock.patch.object(RankGroup, "_wait_for", wait_or_interrupt),
    ):
        yield count


def _interrupted_saves(folder, kind):
    """Interrupt one rank in each exchange of a save in turn. Both ranks try again until both have saved."""
    training = Training(Case()).run(0, 1)
    state, errors, wrong = training.state(), [], []
    mesh = wrap_state(training.model).axes.whole
    training.save(folder / "first")
    with _interrupt(None, kind) as count:
        training.save(folder / "first")
    num_exchanges = next(count)
    for number in range(num_exchanges):
        where = folder / str(number)
        with _interrupt(number, kind) if dist.get_rank() == 1 else nullcontext():
            for _ in range(8):
                try:
                    training.save(where)
                    RankGroup.for_saving(mesh, "agree").run(lambda: None)
                    break
                except (CheckpointError, KeyboardInterrupt) as error:
                    errors.append(f"{type(error).__name__}: {error}")
            else:
                wrong.append((number, errors))
        dist.barrier()
        for path in sorted(where.glob("step_*")):
            loaded = Training(Case(), seed=7)
            loaded.load(path)
            wrong += [(path, found) for found in differences(loaded.state(), state, but_random=True)]
        dist.barrier()
    return wrong, num_exchanges, errors


@pytest.mark.parametrize("kind", INTERRUPTS)
def test_ctrl_c_on_one_rank_in_any_exchange_never_pairs_others(ranks2, tmp_path, kind):
    for rank, (wrong, num_exchanges, errors) in enumerate(ranks2.run(_interrupted_saves, tmp_path, kind)):
        assert wrong == []
        assert num_exchanges >= 7
        assert sum(error.startswith("KeyboardInterrupt") for error in errors) == num_exchanges * rank
        others = [error for error in errors if not error.startswith("KeyboardInterrupt")]
        assert all("KeyboardInterrupt" in error or "the ranks are in different calls: " in error for error in others)
        if kind == "while it waits":
            assert any("agree (call " in error and "save_checkpoint (call " in error for error in others), errors


def _in_different_calls(folder):
    training = Training(Case())
    mesh, rank = wrap_state(training.model).axes.whole, dist.get_rank()
    training.save(folder / "first")
    found = [_error_of(lambda: zeroamp.export_hf(training.model, folder) if rank else training.save(folder / "other"))]
    found.append(_error_of(lambda: RankGroup.for_saving(mesh, "load_checkpoint" if rank else "save").run(int)))
    found.append(_error_of(lambda: training.save(folder, async_=rank == 1)))
    training.save(folder / "last")
    return found, sorted(path.name for path in folder.iterdir())


def test_ranks_in_different_calls_all_raise_and_then_go_on(ranks2, tmp_path):
    results = ranks2.run(_in_different_calls, tmp_path)
    for rank, (found, names) in enumerate(results):
        assert found[0].startswith(("export_hf" if rank else "save_checkpoint") + " stopped, because the ranks are in ")
        assert "export_hf (call 2, exchange 1, " in found[0]
        assert "save_checkpoint (call 2, exchange 1, " in found[0]
        assert "load_checkpoint (call 3, " in found[1]
        assert "save_checkpoint needs the same async_ on all ranks, but got False and True" in found[2]
        assert names == ["first", "last"]


def _alone():
    group = dist.new_group(timeout=timedelta(seconds=2))
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    ranks = RankGroup.for_saving(DeviceMesh.from_group(group, "cpu"), "full_name")
    if rank == 1:
        store.wait(["zeroamp-test-alone"])
        return None
    text = _error_of(lambda: ranks.run(dist.get_rank))
    store.set("zeroamp-test-alone", "1")
    return text


def test_a_first_call_that_one_rank_does_not_reach_is_named(ranks2):
    text, _ = ranks2.run(_alone)
    assert text.startswith("full_name failed on rank 0, in an exchange between the 2 ranks for saving: ")
    assert "did not answer within the process group's timeout" in text


def _fails_to_list(folder):
    training = Training(Case())
    with mock.patch.object(Path, "glob", side_effect=OSError(5, "listing")) if dist.get_rank() else nullcontext():
        return _error_of(lambda: training.save(folder))


def test_an_error_after_the_tensors_are_written_is_raised_on_all_ranks(ranks2, tmp_path):
    for text in ranks2.run(_fails_to_list, tmp_path):
        assert text.startswith(f"Step 0 is not saved in {tmp_path}: rank 1: OSError: [Errno 5] listing")

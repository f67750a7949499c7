"""`async_=True`: the save is written while training goes on, and its error comes out of the next save or wait."""

import gc
import threading
import weakref
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import StagingOptions

import zeroamp
from tests.processes.checkpoint_training import Case, Training, differences
from zeroamp.checkpoint import save as save_module
from zeroamp.rank_group import RankGroup
from zeroamp.wrapping.state import wrap_state


@contextmanager
def _held_back():
    """Let no file of a checkpoint be written before the event that this yields is set."""
    may_write, write = threading.Event(), save_module.write_durably

    def wait_and_write(path, content):
        assert may_write.wait(timeout=60)
        write(path, content)

    with mock.patch.object(save_module, "write_durably", wait_and_write):
        yield may_write


def _trains_on_while_writing(folder):
    training = Training(Case(scheduler="cosine")).run(0, 1)
    with _held_back() as may_write:
        first = training.save(folder, async_=True)
        then = training.state()
        training.run(1, 3)
        was_there = first.exists()
        dist.barrier()
        may_write.set()
        second = training.save(folder, async_=True)  # waits for the first
        is_there = first.exists()
        zeroamp.wait_for_save(training.model)
    loaded = Training(Case(scheduler="cosine"), seed=7)
    loaded.load(first)
    return was_there, is_there, differences(loaded.state(), then), second.name, second.exists()


def test_the_checkpoint_is_of_the_moment_of_the_call(ranks2, tmp_path):
    """Training goes on and the checkpoint is of the moment of the call."""
    expected = (False, True, [], "step_00000003", True)
    assert ranks2.run(_trains_on_while_writing, tmp_path / "checkpoints") == [expected] * 2


def _destroyed_while_writing(folder):
    training = Training(Case())
    with _held_back() as may_write:
        path = training.save(folder, async_=True)
        with mock.patch.object(save_module, "dist"):  # the default group is another one
            may_write.set()
            with pytest.raises(zeroamp.CheckpointError) as raised:
                zeroamp.wait_for_save(training.model)
    return str(raised.value), path.exists()


def test_a_process_group_that_is_destroyed_before_the_save_ends_is_named(ranks2, tmp_path):
    for text, exists in ranks2.run(_destroyed_while_writing, tmp_path / "checkpoints"):
        assert "the process group was destroyed before the save in the background ended" in text
        assert not exists


CALLS = {
    "save": zeroamp.save_checkpoint,
    "load": zeroamp.load_checkpoint,
    "wait": lambda folder, model, train: zeroamp.wait_for_save(model),
}


def _fails_on_one_rank(folder):
    training = Training(Case())
    write = save_module.write_durably

    def fail(path, content):
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        write(path, content)

    text = r"Step \d is not saved in .*: rank 1: OSError: \[Errno 28\] No space left on device$"
    for index, call in enumerate(CALLS.values()):
        training.run(2 * index, 2 * index + 1)
        with mock.patch.object(save_module, "write_durably", fail):
            training.save(folder, async_=True)
            training.run(2 * index + 1, 2 * index + 2)
            with pytest.raises(zeroamp.CheckpointError, match=text):
                call(folder, training.model, training.train)
    dist.barrier()  # the first rank has removed its draft when its call raises
    names = sorted(path.name for path in Path(folder).iterdir())
    dist.barrier()
    return training.train.num_steps, names, training.save(folder).name


def test_an_error_of_one_rank_comes_out_of_the_next_call(ranks2, tmp_path):
    """An error of one rank comes out of the next call on all and training goes on."""
    assert ranks2.run(_fails_on_one_rank, tmp_path / "checkpoints") == [(6, [], "step_00000006")] * 2


def _two_models(folder):
    """The background save of one model fails, that of the other does not."""
    one, other = Training(Case()), Training(Case())
    write = save_module.write_durably

    def fail(path, content):
        if "one" in str(path):
            raise OSError(28, "No space left on device")
        write(path, content)

    with mock.patch.object(save_module, "write_durably", fail):
        one.save(folder / "one", async_=True)
        path = other.save(folder / "other", async_=True)
        zeroamp.wait_for_save(other.model)
        assert other.save(folder / "other").exists()
        with pytest.raises(zeroamp.CheckpointError, match="one: OSError: .*No space left"):
            zeroamp.wait_for_save(one.model)
        zeroamp.wait_for_save(one.model)
    return path.exists(), (folder / "one" / "latest").exists()


def test_each_of_two_models_raises_the_error_of_its_own_save(ranks2, tmp_path):
    assert ranks2.run(_two_models, tmp_path) == [(True, False)] * 2


def _fails_and_is_dropped(folder, waits):
    training = Training(Case())
    with mock.patch.object(save_module, "write_durably", side_effect=OSError(28, "No space left on device")):
        training.save(folder, async_=True)
        if waits:
            with pytest.raises(zeroamp.CheckpointError, match="No space"):
                zeroamp.wait_for_save(training.model)
        else:
            RankGroup.for_saving(wrap_state(training.model).axes.whole)
    model = weakref.ref(training.model)
    for thread in threading.enumerate():
        if thread.name.startswith("zeroamp-checkpoint"):
            thread.join()  # it logs the error
    del training
    gc.collect()
    return model() is None


@pytest.mark.parametrize("waits", [True, False])
def test_a_failed_save_does_not_retain_a_model_that_is_dropped(ranks2, tmp_path, waits):
    assert ranks2.run(_fails_and_is_dropped, tmp_path, waits) == [True, True]


class _Unusable(zeroamp.Callback):
    def before_update(self):
        raise OSError("no space")


def _saves_after_a_failure(folder):
    training = Training(Case())
    training.train.callbacks.append(_Unusable())
    with pytest.raises(OSError, match="no space"):
        training.run(0, 1)
    with pytest.raises(zeroamp.StepError, match=r"failure in optimizer.step .OSError: no space.\. Load"):
        training.save(folder)
    return Path(folder).exists()


def test_a_save_after_something_raised_is_refused(ranks2, tmp_path):
    assert ranks2.run(_saves_after_a_failure, tmp_path / "checkpoints") == [False] * 2


def _is_in_a_thread():
    return threading.current_thread() is not threading.main_thread()


def _device_calls_of_a_background_save(folder):
    """Return what the thread of a background save asks of CUDA, where torch sees a GPU while it writes."""
    training = Training(Case()).run(0, 1)
    asked = []

    def stream(*_args):
        asked.append(threading.current_thread().name)
        raise RuntimeError("a context on GPU 0")

    with (
        mock.patch.object(torch.cuda, "is_available", side_effect=_is_in_a_thread),
        mock.patch.object(torch.cuda, "current_stream", side_effect=stream),
    ):
        training.save(folder, async_=True)
        zeroamp.wait_for_save(training.model)
    return asked


def test_the_thread_of_a_background_save_uses_no_gpu(ranks2, tmp_path):
    assert ranks2.run(_device_calls_of_a_background_save, tmp_path / "checkpoints") == [[], []]


def test_tensors_of_an_accelerator_are_copied_to_pinned_memory_that_is_kept(monkeypatch):
    made = []
    monkeypatch.setattr(save_module, "DefaultStager", lambda options: made.append(options) or object())
    save_module._pinned_stager.cache_clear()
    assert save_module.stager("cuda") is save_module.stager("cuda")
    assert save_module.stager("cpu") is not save_module.stager("cpu")
    pinned = StagingOptions(
        use_pinned_memory=True, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=True
    )
    assert made == [pinned, *[StagingOptions(False, False, False, False)] * 2]
    save_module._pinned_stager.cache_clear()

"""`async_=True`: the save is written while training goes on, and its errors come out of `TrainStep.step`."""

import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.small import batch, loss_of
from tests.processes.training import config, full_parameters, same_bits, wrapped
from zeroamp.checkpoint import save as save_module
from zeroamp.checkpoint.background import saving_of
from zeroamp.wrapping.state import wrap_state

NAME = "llama_tied"


def _training():
    model = wrapped(NAME, config(2))
    return model, zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def _take_step(model, train, index):
    train.backward(loss_of(model, batch(NAME, 2 * index + dist.get_rank())))
    return train.step()


def _trains_on_while_writing(folder):
    model, train = _training()
    _take_step(model, train, 0)
    then = full_parameters(model)
    may_write, write = threading.Event(), save_module.write_durably

    def wait_and_write(path, content):
        assert may_write.wait(timeout=60)
        write(path, content)

    save_module.write_durably = wait_and_write
    try:
        future = zeroamp.save_checkpoint(folder, model, train, async_=True)
        for index in (1, 2):
            _take_step(model, train, index)
        was_done = future.done()
        may_write.set()
        second = zeroamp.save_checkpoint(folder, model, train, async_=True)  # waits for the first
        was_first_done, steps_taken = future.done(), train.num_steps
        zeroamp.wait_for_save(model)
    finally:
        save_module.write_durably = write
    other, _ = _training()
    zeroamp.load_checkpoint(future.result(), other)
    return was_done, was_first_done, steps_taken, same_bits(then, full_parameters(other)), second.result().name


def test_training_goes_on_and_the_checkpoint_is_of_the_moment_of_the_call(ranks2, tmp_path):
    expected = (False, True, 3, [], "step_00000003")
    assert ranks2.run(_trains_on_while_writing, tmp_path / "checkpoints") == [expected] * 2


def _fails_on_one_rank(folder):
    model, train = _training()
    _take_step(model, train, 0)
    write = save_module.write_durably

    def fail(path, content):
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        write(path, content)

    save_module.write_durably = fail
    try:
        future = zeroamp.save_checkpoint(folder, model, train, async_=True)
        assert isinstance(future.exception(timeout=60), zeroamp.CheckpointError)
    finally:
        save_module.write_durably = write
    text = r"Step 1 is not saved in .*: rank 1: OSError: \[Errno 28\] No space left on device$"
    with pytest.raises(zeroamp.CheckpointError, match=text):
        _take_step(model, train, 1)
    _take_step(model, train, 2)
    names = sorted(path.name for path in Path(folder).iterdir())
    path = zeroamp.save_checkpoint(folder, model, train)
    return train.num_steps, names, path.name


def test_an_error_of_one_rank_comes_out_of_the_next_step_of_all_and_training_goes_on(ranks2, tmp_path):
    answers = ranks2.run(_fails_on_one_rank, tmp_path / "checkpoints")
    assert answers == [(3, [".lock"], "step_00000003")] * 2


def _error_at_the_next_save(folder):
    model, train = _training()
    zeroamp.save_checkpoint(folder, model, train, async_=True)
    with pytest.raises(zeroamp.CheckpointError, match="Not a directory"):
        zeroamp.wait_for_save(model)
    return saving_of(wrap_state(model)).future


def test_an_impossible_folder_is_an_error_of_the_background(ranks2, tmp_path):
    file = tmp_path / "a file"
    file.touch()
    assert ranks2.run(_error_at_the_next_save, file / "checkpoints") == [None] * 2


def _saves_once_more(folder):
    model, train = _training()
    with open(folder / "file", "w"):
        pass
    zeroamp.save_checkpoint(folder / "file" / "below", model, train, async_=True)
    return zeroamp.save_checkpoint(folder / "works", model, train).name


def test_a_failure_of_the_background_does_not_stop_the_next_save(ranks2, tmp_path):
    assert ranks2.run(_saves_once_more, tmp_path) == ["step_00000000"] * 2


class _Unusable(zeroamp.Callback):
    def before_update(self):
        raise OSError("no space")


def _saves_after_a_failure(folder):
    model, train = _training()
    train.callbacks.append(_Unusable())
    with pytest.raises(OSError, match="no space"):
        _take_step(model, train, 0)
    with pytest.raises(zeroamp.StepError, match=r"failure in optimizer.step .OSError: no space.\. Restart"):
        zeroamp.save_checkpoint(folder, model, train)
    return Path(folder).exists()


def test_a_save_after_something_raised_is_refused(ranks2, tmp_path):
    assert ranks2.run(_saves_after_a_failure, tmp_path / "checkpoints") == [False] * 2


class _Talkative(torch.nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "seen"] = torch.tensor(7)


def _state_of_its_own(folder):
    model = zeroamp.wrap_model(torch.nn.Sequential(_Talkative(4, 4)), zeroamp.policy_from_config(config(2)))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    with pytest.raises(zeroamp.CheckpointError, match="^0.seen .*state_dict.*get_extra_state"):
        zeroamp.save_checkpoint(folder, model, train)


def test_state_that_could_not_be_loaded_is_refused(ranks2, tmp_path):
    ranks2.run(_state_of_its_own, tmp_path)


def _is_in_a_thread():
    return threading.current_thread() is not threading.main_thread()


def _device_calls_of_a_background_save(folder):
    """Return what the thread of a background save asks of CUDA, where torch sees a GPU while it writes."""
    model, train = _training()
    _take_step(model, train, 0)
    asked = []

    def stream(*_args):
        asked.append(threading.current_thread().name)
        raise RuntimeError("a context on GPU 0")

    with (
        mock.patch.object(torch.cuda, "is_available", side_effect=_is_in_a_thread),
        mock.patch.object(torch.cuda, "current_stream", side_effect=stream),
    ):
        zeroamp.save_checkpoint(folder, model, train, async_=True)
        zeroamp.wait_for_save(model)
    return asked


def test_the_thread_of_a_background_save_uses_no_gpu(ranks2, tmp_path):
    assert ranks2.run(_device_calls_of_a_background_save, tmp_path / "checkpoints") == [[], []]

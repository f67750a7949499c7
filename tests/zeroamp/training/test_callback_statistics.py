"""Statistics of callbacks: in the one all-reduce of a step, read in the same step or, off the CPU, in the next."""

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.small import batch, loss_of
from tests.processes.training import config, wrapped
from zeroamp.checkpoint import save as save_module
from zeroamp.training.step import driver_of
from zeroamp.wrapping.state import wrap_state

NAME = "llama_tied"
HOST_COLLECTIVES = ("all_reduce", "all_gather_object", "broadcast_object_list", "send", "recv", "new_group", "barrier")


class _Part(zeroamp.Callback):
    def __init__(self, name, numbers, got):
        self.name, self.numbers, self.got = name, numbers, got

    def statistics(self):
        return self.numbers, lambda values: self.got.append((self.name, values))


def _handed_out(is_late):
    """What the callbacks got in two steps, by name, and the number of steps."""
    model, train = _training(is_late=is_late)
    got = []
    train.callbacks.append(_Part("b", [], got))
    wrap_state(model).callbacks.append(_Part("a", [1.0], got))  # those of the model come first
    for step in range(2):
        if step == 1:  # asked for in this step only
            train.callbacks.append(_Part("c", [2.0, 3.0], got))
        _take_step(model, train, step)
    return got, wrap_state(model).step.num_summed


@pytest.mark.parametrize("is_late", [False, True])
def test_callbacks_get_the_sums_of_their_numbers_in_the_same_step_or_one_late(ranks2, is_late):
    first, second = [("a", [2.0]), ("b", [])], [("a", [2.0]), ("b", []), ("c", [4.0, 6.0])]
    assert ranks2.run(_handed_out, is_late) == [(first if is_late else first + second, 2)] * 2


def _training(*, is_late=False):
    """`is_late`: whether sums are read one step late, as on a device."""
    model = wrapped(NAME, config(3))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    driver_of(train).all_reduce.is_late = is_late
    return model, train


def _take_step(model, train, index=0):
    train.backward(loss_of(model, batch(NAME, 2 * index + dist.get_rank())))
    return train.step()


def _signalled(is_late):
    """What `is_requested` returns after each step, where it may call no collective."""
    with pytest.MonkeyPatch.context() as patch:
        model, train = _training(is_late=is_late)
        with zeroamp.Preemption(model) as preemption:
            answers = []
            for index in range(4):
                if (index, dist.get_rank()) == (1, 1):
                    os.kill(os.getpid(), signal.SIGTERM)
                _take_step(model, train, index)
                for name in HOST_COLLECTIVES:
                    patch.setattr(dist, name, None)  # a call would raise
                answers.append(preemption.is_requested())
                patch.undo()
    return answers


@pytest.mark.parametrize("is_late", [False, True])
def test_a_signal_is_known_on_all_ranks_after_a_step_without_a_collective(ranks2, is_late):
    known = [False, not is_late, True, True]
    assert ranks2.run(_signalled, is_late) == [known] * 2


def _without_steps():
    """A signal outside of steps, two contexts, and one of another model that is not trained."""
    model, train = _training()
    other, _ = _training()
    found = []
    with zeroamp.Preemption(model) as outer, zeroamp.Preemption(other, [signal.SIGUSR2]) as idle:
        with zeroamp.Preemption(model) as inner:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            found.append((inner.is_requested(), outer.is_requested()))
            _take_step(model, train)
            found.append((inner.is_requested(), outer.is_requested(), idle.is_requested()))
        found.append((outer.is_requested(), inner.is_requested()))
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGUSR2)
        _take_step(model, train)
        found.append((outer.is_requested(), idle.is_requested()))
    with zeroamp.Preemption(model) as again:
        _take_step(model, train)
        found.append(again.is_requested())
    return found


def test_contexts_answer_for_themselves_with_and_without_steps(ranks2):
    expected = [(True, False), (True, False, False), (False, True), (False, True), False]
    assert ranks2.run(_without_steps) == [expected] * 2


def _steps_while_saving(folder, is_late):
    """The numbers of a step's all-reduce and the other collectives on the host, while a save runs and fails."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        model, train = _training(is_late=is_late)
        _take_step(model, train)
        may_write = threading.Event()

        def fail(_path, _content):
            assert may_write.wait(timeout=60)
            raise OSError(28, "No space left on device")

        patch.setattr(save_module, "write_durably", fail)
        future = zeroamp.save_checkpoint(folder, model, train, async_=True)
        calls, own = [], threading.get_ident()  # the thread that saves has collectives of its own

        def counted(name, real):
            def call(*args, **options):
                calls.extend([name] if threading.get_ident() == own else [])
                return real(*args, **options)

            return call

        for name in ("all_reduce", "all_gather_object", "new_group"):
            patch.setattr(dist, name, counted(name, getattr(dist, name)))
        for index in (1, 2):
            _take_step(model, train, index)
        found.append(list(calls))
        may_write.set()
        assert isinstance(future.exception(timeout=60), zeroamp.CheckpointError)
        patch.undo()
        dist.barrier()
        for index in (3, 4, 5):
            try:
                _take_step(model, train, index)
                found.append("went on")
            except zeroamp.CheckpointError as error:
                found.append(str(error).partition("is not saved")[1])
    return found, train.num_steps


@pytest.mark.parametrize("is_late", [False, True])
def test_a_save_in_the_background_needs_no_collective_of_its_own_in_a_step(ranks2, tmp_path, is_late):
    outcome = ["went on"] * 3
    outcome[int(is_late)] = "is not saved"
    expected = [["all_reduce"] * 2, *outcome], 6
    assert ranks2.run(_steps_while_saving, tmp_path / "checkpoints", is_late) == [expected] * 2


def _shape_of_statistics(stage):
    model = zeroamp.wrap_model(torch.nn.Linear(4, 4), zeroamp.policy_from_config(config(stage)))
    train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sizes, of_steps = [], []
    with pytest.MonkeyPatch.context() as patch:
        real = dist.all_reduce
        patch.setattr(dist, "all_reduce", lambda t, *a, **k: sizes.append(t.numel()) or real(t, *a, **k))
        for number in range(2):
            train.backward(model(torch.ones(2, 4)).sum())
            train.step()
            of_steps.append(sizes[-1])
            if number == 0:
                zeroamp.Preemption(model)
                zeroamp.Preemption(model)
    return of_steps[1] - of_steps[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_preemptions_of_the_same_signals_add_one_number(ranks2, stage):
    assert ranks2.run(_shape_of_statistics, stage) == [1, 1]

"""An error in the middle of a move between device and host: no state is lost, and the next attempt succeeds."""

import itertools
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import zeroamp
from tests.models.small import batch
from tests.processes.training import SmallTraining, adamw, config, same_bits
from zeroamp.host_memory import between_steps
from zeroamp.host_memory.storages import HostCopies, put_state_away

NAME = "recurrent"
PARTS = ("params", "grads", "optimizer")
FAULTY = {"aten::empty", "aten::copy_", "aten::set_", "aten::resize_"}


class _FullMemory(TorchDispatchMode):
    """Raises an out-of-memory error in one of the allocations and copies that run in it, counted from 0."""

    def __init__(self, number):
        super().__init__()
        self.left, self.resize = number, torch.UntypedStorage.resize_

    def _count(self):
        self.left -= 1
        if self.left == -1:
            raise torch.OutOfMemoryError("full")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().split(".")[0] in FAULTY:
            self._count()
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        def resize(storage, size):
            self._count()
            return self.resize(storage, size)

        self.patch = mock.patch.object(torch.UntypedStorage, "resize_", resize)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.stop()
        return super().__exit__(*error)


def _bits(training):
    """The bits of this rank's parameters, gradients and optimizer state, read as a caller reads them."""
    tensors = {}
    for fqn, parameter in training.model.named_parameters():
        tensors[fqn], tensors[f"{fqn}.grad"] = parameter, parameter.grad
        tensors |= {f"{fqn}.{key}": value for key, value in training.optimizer.state.get(parameter, {}).items()}
    found = {name: each for name, each in tensors.items() if each is not None}
    assert all(each.untyped_storage().nbytes() for each in map(_local, found.values()) if each.numel()), "freed"
    return {name: _local(each).detach().clone() for name, each in found.items()}


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _faults(action, check, stride=1):
    """Let each allocation and copy of `action` fail in turn, or each `stride`-th, until it succeeds.

    Return how many it has.
    """
    for number in range(0, 10_000, stride):
        try:
            with _FullMemory(number):
                action()
        except torch.OutOfMemoryError:
            check()
        else:
            return number
    raise AssertionError("never succeeds")


def _trained(more, num_steps=2):
    training = SmallTraining(config(2, **more), adamw, name=NAME)
    for index in range(num_steps):
        training.step(index)
    return training


def _trained_with_gradients():
    training = _trained({})
    for parameter in training.model.parameters():
        parameter.grad = parameter.detach() * 0.5
    return training


def _slept(what, stride):
    """Sleep and wake with a fault at every point. Return how many points each has, and what differs at the end."""
    training, counts = _trained_with_gradients(), []
    model, optimizer, before, inputs = training.model, training.optimizer, _bits(training), batch(NAME, 0)
    num_checks = itertools.count()

    def is_awake():
        assert same_bits(_bits(training), before) == []
        if next(num_checks) % 10 == 0:
            with torch.no_grad():
                model(inputs)

    def is_asleep():
        assert same_bits(_bits(training), before) == []
        with pytest.raises(zeroamp.ZeroAmpError, match=r"zeroamp.wake\(model\)"):
            optimizer.step()

    with mock.patch.object(between_steps, "PART_BYTES", 3_000):
        counts.append(_faults(lambda: zeroamp.sleep(model, optimizer, what), is_awake, stride))
        is_asleep()
        counts.append(_faults(lambda: zeroamp.wake(model), is_asleep, stride))
        is_awake()
    optimizer.step()
    undisturbed = _trained_with_gradients()
    undisturbed.optimizer.step()
    return counts, same_bits(training.parameters(), undisturbed.parameters())


AT_EACH = [pytest.param([part], 7, marks=pytest.mark.slow) for part in PARTS]


@pytest.mark.parametrize(("what", "stride"), [(PARTS, 19), *AT_EACH])  # a storage has 4 points
def test_sleep_and_wake_lose_nothing_at_any_fault(ranks2, what, stride):
    for counts, differing in ranks2.run(_slept, what, stride):
        assert differing == []
        assert min(counts) >= 10, "every storage is allocated and copied"


def _between_steps():
    with mock.patch.object(between_steps, "PART_BYTES", 3_000):
        training, counts = _trained({"zeroamp": {"offload_between_steps": ["optimizer"]}}), []
        before, optimizer = _bits(training), training.optimizer

        def is_whole():
            assert same_bits(_bits(training), before) == []

        for _ in range(2):
            counts.append(_faults(optimizer.state_dict, is_whole, stride=9))  # a storage has 4 points
            counts.append(_faults(lambda: put_state_away(optimizer), is_whole, stride=9))
        training.step(2)
    return counts, same_bits(training.parameters(), _trained({}, 3).parameters())


def test_state_that_is_read_between_steps_survives_any_fault(ranks2):
    for counts, differing in ranks2.run(_between_steps):
        assert differing == []
        assert min(counts) >= 10


class _Limited:
    """Lets the moves of `HostCopies` fail at one of their allocations and copies, and nothing else."""

    def __init__(self, number):
        self.memory = _FullMemory(number)

    def patched(self, name):
        method = getattr(HostCopies, name)

        def limited(*arguments):
            with self.memory:
                return method(*arguments)

        return mock.patch.object(HostCopies, name, limited)


def _in_updates():
    """Let each move of an update fail in turn. Return how many fail, and the state that is neither old nor new."""
    broken, number = [], 0
    with mock.patch.object(between_steps, "PART_BYTES", 3_000):
        training = _trained({"zeroamp": {"offload_between_steps": ["optimizer"]}})
        before, after = _bits(training), _bits(_trained({}, 3))
        while True:
            training.backward(2)
            limited = _Limited(number)
            with limited.patched("__init__"), limited.patched("restore"):
                try:
                    training.train.step()
                    return number, broken, same_bits(_bits(training), after)
                except (torch.OutOfMemoryError, zeroamp.ZeroAmpError):
                    pass
            found = _bits(training)
            names = [name for name in before if not name.endswith(".grad")]
            broken += [n for n in names if not any(torch.equal(found[n], each[n]) for each in (before, after))]
            training = _trained({"zeroamp": {"offload_between_steps": ["optimizer"]}})
            number += 31  # a sample: each number needs a training of its own


@pytest.mark.slow
def test_an_update_in_parts_loses_nothing_at_a_fault(ranks2):
    for num_faults, broken, differing in ranks2.run(_in_updates):
        assert (broken, differing) == ([], [])
        assert num_faults > 10

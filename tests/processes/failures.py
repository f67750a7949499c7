"""Failures for the tests of recovery: raised after a number of collectives, or at a place in the model."""

from contextlib import contextmanager

import torch

from zeroamp.hooks.collectives.reduce_scatter import GroupReduceScatter
from zeroamp.wrapping.state import wrap_state


class Failed(Exception):
    pass


@contextmanager
def failing_after(num_collectives, model):
    """Raise once this rank has issued that many collectives of the model's groups in the block."""
    listeners, listener = wrap_state(model).listeners, _RaisesAfter(num_collectives)
    listeners.append(listener)  # last: a recovery has logged the collective when this raises
    try:
        yield
    finally:
        listeners.remove(listener)


class _RaisesAfter:
    def __init__(self, num_collectives):
        self.num_collectives, self.issued = num_collectives, 0

    def on_collective(self, issued):
        self.issued += 1
        if self.issued == self.num_collectives:
            raise Failed(f"after {self.num_collectives} collectives")


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Failed("in backward")


@contextmanager
def failing_in(module, place):
    """Raise in the forward or the backward of a module."""

    def hook(_module, _args, output):
        if place == "forward":
            raise Failed("in forward")
        return RaisesInBackward.apply(output)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def failing_allocation(number, seen):
    """Raise in one allocation of the reductions, counted from 1; append (elements, dtype) of the others to `seen`."""
    allocate = GroupReduceScatter.allocate

    def failing(*_args, **_kwargs):
        raise Failed(f"in allocation {number}")

    def counted(comm, size, **options):
        if len(seen) + 1 == number:
            empty, torch.empty = torch.empty, failing
            try:
                return allocate(comm, size, **options)
            finally:
                torch.empty = empty
        tensor = allocate(comm, size, **options)
        seen.append((tensor.numel(), tensor.dtype))
        return tensor

    GroupReduceScatter.allocate = counted
    try:
        yield
    finally:
        GroupReduceScatter.allocate = allocate

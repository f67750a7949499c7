"""Failures for the tests of recovery: raised after a number of collectives, or at a place in the model."""

from contextlib import contextmanager

import torch

from zeroamp.recovery.call_log import CallLog


class Failed(Exception):
    pass


@contextmanager
def failing_after(num_collectives):
    """Raise once this rank has issued that many collectives in the block."""
    on_collective, issued = CallLog.on_collective, 0

    def raise_after(log, *args):
        nonlocal issued
        on_collective(log, *args)
        issued += 1
        if issued == num_collectives:
            raise Failed(f"after {num_collectives} collectives")

    CallLog.on_collective = raise_after
    try:
        yield
    finally:
        CallLog.on_collective = on_collective


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

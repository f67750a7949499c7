"""Accumulates sharded gradients over micro-batches in another dtype or order than FSDP2 does (stages 2 and 3).

FSDP2 adds each micro-batch's reduced shard to `parameter.grad`, which has the parameter's dtype. To accumulate in a
lower dtype, or in another order, `ShardAccumulator` moves `parameter.grad` into sums of its own after every reduction,
and sets `parameter.grad` from them at the end of the optimizer step.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from zeroamp.planning.mesh import sharded_like
from zeroamp.policies.accumulation import sharded_accumulation
from zeroamp.wrapping.state import WrapState


class MicroBatchSum(Protocol):
    """The sum of one gradient over micro-batches."""

    def add(self, number: int, term: torch.Tensor) -> None:
        """Add `term`, the fp32 gradient of micro-batch `number`. The sum may retain and overwrite the tensor."""

    def first(self) -> torch.Tensor:
        """Return the sum, or the earliest partial sum."""

    def total(self) -> torch.Tensor:
        """Return the sum of all terms; it may share their memory. Call once, last."""


class RoundedSum:
    """The sum in the order of the micro-batches, rounded to `dtype` after each addition."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sum: torch.Tensor | None = None

    def add(self, number: int, term: torch.Tensor) -> None:  # noqa: D102
        del number
        if self._sum is None:
            self._sum = term.to(self._dtype)
        else:
            self._sum.add_(term)  # computed in fp32, rounded once

    def first(self) -> torch.Tensor:  # noqa: D102
        if self._sum is None:
            raise AssertionError("expected at least one term")
        return self._sum

    total = first


class ShardAccumulator:
    """Holds this rank's accumulated gradient shards between micro-batches."""

    def __init__(self, new_sum: Callable[[], MicroBatchSum], device_type: str) -> None:
        """Take `new_sum`, which makes an empty sum for one parameter, and the device type of the mesh."""
        self.device_type = device_type  # where gradients are reduced
        self.micro_batch = 0
        """The number of the micro-batch whose backward runs. Set before each backward."""
        self._new_sum = new_sum
        self._sums: dict[nn.Parameter, MicroBatchSum] = {}
        self._handles: dict[nn.Parameter, RemovableHandle] = {}
        self._offloaded: set[nn.Parameter] = set()  # watched parameters whose shards are on another device

    @property
    def sums(self) -> Mapping[nn.Parameter, torch.Tensor]:
        """Parameter -> its first partial sum: this rank's shard, accumulation dtype. Empty between optimizer steps."""
        return {parameter: total.first() for parameter, total in self._sums.items()}

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether there is a sum of a parameter's gradients."""
        return parameter in self._sums

    @property
    def is_watching(self) -> bool:
        """Whether `watch` was called and `forget` was not called since."""
        return bool(self._handles or self._offloaded)

    def forget(self) -> None:
        """Stop accumulating: remove the hooks of `watch`."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._offloaded.clear()

    def discard(self, parameters: Iterable[nn.Parameter]) -> None:
        """Release the sums of these parameters."""
        for parameter in parameters:
            self._sums.pop(parameter, None)

    def drop(self) -> None:
        """Release the sums of an optimizer step that is discarded."""
        self._sums.clear()

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Accumulate the gradients of sharded, trainable parameters after every reduction from now on.

        FSDP2 runs these hooks itself, once per reduction, with the sharded fp32 gradient in `parameter.grad`. Gradients
        of offloaded shards are copied to the CPU while the host continues: `end_backward` takes them. Call this before
        each backward, so that parameters unfrozen in between are included.
        """
        for parameter in parameters:
            if not parameter.requires_grad or not isinstance(parameter, DTensor):
                continue
            if parameter.device.type != self.device_type:
                self._offloaded.add(parameter)
            elif parameter not in self._handles:
                register = parameter.register_post_accumulate_grad_hook
                self._handles[parameter] = register(self._take)  # type: ignore[no-untyped-call]

    def _take(self, parameter: torch.Tensor) -> None:
        shard = cast(DTensor, parameter.grad).to_local()  # sharded fp32
        parameter.grad = None
        key = cast(nn.Parameter, parameter)
        if key not in self._sums:
            self._sums[key] = self._new_sum()
        self._sums[key].add(self.micro_batch, shard)

    def end_backward(self) -> None:
        """Take the gradients of offloaded shards. Waits for the device, which may still copy them."""
        if self._offloaded:
            torch.accelerator.synchronize()
        for parameter in self._offloaded:
            if parameter.grad is not None:
                self._take(parameter)

    def flush(self) -> None:
        """Move the sums into `parameter.grad`, as DTensors of the parameter's dtype."""
        for parameter, total in self._sums.items():
            parameter.grad = sharded_like(total.total().to(parameter.dtype), cast(DTensor, parameter))
        self._sums.clear()


def round_sums(state: WrapState) -> None:
    """Sum the sharded gradients of micro-batches in `data_types.grad_accum_dtype`."""
    accumulate_shards(state, partial(RoundedSum, sharded_accumulation(state.plan.policy)))


def accumulate_shards(state: WrapState, new_sum: Callable[[], MicroBatchSum]) -> ShardAccumulator:
    """Sum the sharded gradients of micro-batches by `new_sum`, in another dtype or order than FSDP2 does."""
    state.step.shard_accumulator = accumulator = ShardAccumulator(new_sum, state.mesh.device_type)
    for group in state.gradients:
        group.has_sum = accumulator.has
    return accumulator

"""Accumulates sharded gradients over micro-batches in another dtype or order than FSDP2 does (stages 2 and 3).

FSDP2 adds each micro-batch's reduced shard to `parameter.grad`, which has the parameter's dtype. To accumulate in a
lower dtype, or in another order, `ShardAccumulator` moves `parameter.grad` into sums of its own after every reduction,
and sets `parameter.grad` from them at the end of the optimizer step.

[Note: Offloaded shards]
FSDP2 copies the reduced gradients of a group to offloaded shards while the host continues, and records an event after
the copies. The host may read the gradients after that event. They are added to the sums only when the next group has
been reduced: the host then waits for one event per group, and that event has usually passed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks._torch.after_reduction import after_each_reduction
from zeroamp.planning.mesh import shard_device
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
        self._copied: list[tuple[nn.Parameter, torch.Tensor]] = []  # gradients of one group, not added to the sums yet
        self._copied_in = 0  # the micro-batch that they are of
        self._after_copies: Any = None  # the event that FSDP2 recorded after it copied them

    @property
    def sums(self) -> Mapping[nn.Parameter, torch.Tensor]:
        """Parameter -> its first partial sum: this rank's shard, accumulation dtype. Empty between optimizer steps."""
        self._sum_copied()
        return {parameter: total.first() for parameter, total in self._sums.items()}

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
        self._sum_copied()
        for parameter in parameters:
            self._sums.pop(parameter, None)

    def drop(self) -> None:
        """Release the sums of an optimizer step that is discarded."""
        self._sums.clear()
        self._copied, self._after_copies = [], None

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Accumulate the gradients of sharded, trainable parameters after every reduction from now on.

        FSDP2 runs these hooks itself, once per reduction, with the sharded fp32 gradient in `parameter.grad`. For
        offloaded shards `take` must be called instead. Call before each backward, so that parameters unfrozen in
        between are included.
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
        self._add(cast(nn.Parameter, parameter), shard, self.micro_batch)

    def take(self, parameters: Sequence[nn.Parameter], event: Any) -> None:
        """Move the gradients of a group with offloaded shards out of `parameter.grad`, and add them to the sums later.

        See [Note: Offloaded shards].

        Args:
            parameters: the sharded parameters of the group. Those that are not watched or have no gradient are skipped.
            event: the event after which `parameter.grad` is valid. None if it is valid already.
        """
        taken = [parameter for parameter in parameters if parameter in self._offloaded and parameter.grad is not None]
        if taken:
            self._sum_copied()
            self._copied = [(parameter, cast(DTensor, parameter.grad).to_local()) for parameter in taken]
            self._copied_in, self._after_copies = self.micro_batch, event
        for parameter in taken:
            parameter.grad = None

    def _sum_copied(self) -> None:
        """Add the gradients of the last `take` to the sums. Waits for their event."""
        if self._after_copies is not None:
            self._after_copies.synchronize()
        for parameter, shard in self._copied:
            self._add(parameter, shard, self._copied_in)
        self._copied, self._after_copies = [], None

    def _add(self, parameter: nn.Parameter, shard: torch.Tensor, micro_batch: int) -> None:
        if parameter not in self._sums:
            self._sums[parameter] = self._new_sum()
        self._sums[parameter].add(micro_batch, shard)

    def take_sum(self, parameter: nn.Parameter) -> MicroBatchSum | None:
        """Remove and return the sum of a parameter; None if it has none."""
        self._sum_copied()
        return self._sums.pop(parameter, None)

    def flush(self) -> None:
        """Move the sums into `parameter.grad`, as DTensors of the parameter's dtype."""
        self._sum_copied()
        for parameter, total in self._sums.items():
            sharded = cast(DTensor, parameter)
            parameter.grad = DTensor.from_local(
                total.total().to(parameter.dtype),
                sharded.device_mesh,
                sharded.placements,
                run_check=False,
                shape=sharded.shape,
                stride=sharded.stride(),
            )
        self._sums.clear()


def round_sums(model: nn.Module, state: WrapState) -> None:
    """Sum the sharded gradients of micro-batches in `data_types.grad_accum_dtype`."""
    accumulate_shards(model, state, partial(RoundedSum, sharded_accumulation(state.plan.policy)))


def accumulate_shards(model: nn.Module, state: WrapState, new_sum: Callable[[], MicroBatchSum]) -> ShardAccumulator:
    """Sum the sharded gradients of micro-batches by `new_sum`, in another dtype or order than FSDP2 does."""
    state.step.shard_accumulator = accumulator = ShardAccumulator(new_sum, state.mesh.device_type)
    if shard_device(state.plan.policy, state.mesh).type != state.mesh.device_type:
        after_each_reduction(model, accumulator.take)
    return accumulator

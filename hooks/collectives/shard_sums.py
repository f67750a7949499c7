"""Gradient accumulation of sharded gradients in another dtype than fp32 (stages 2 and 3).

FSDP2 adds each micro-batch's reduced shard to `parameter.grad`, which has the parameter's dtype. To accumulate in a
lower dtype, `ShardAccumulator` moves `parameter.grad` into a buffer of that dtype after every reduction, and sets
`parameter.grad` from the buffer at the end of the optimizer step.

[Note: Offloaded shards]
FSDP2 copies the reduced gradients of a group to offloaded shards while the host continues, and records an event after
the copies. The host may read the gradients after that event. They are added to the sums only when the next group has
been reduced: the host then waits for one event per group, and that event has usually passed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle


class ShardAccumulator:
    """Holds this rank's accumulated gradient shards in `dtype` between micro-batches."""

    def __init__(self, dtype: torch.dtype, device_type: str) -> None:
        self.dtype = dtype
        self.device_type = device_type  # of the mesh: where gradients are reduced
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._handles: dict[nn.Parameter, RemovableHandle] = {}
        self._offloaded: set[nn.Parameter] = set()  # watched parameters whose shards are on another device
        self._copied: list[tuple[nn.Parameter, torch.Tensor]] = []  # gradients of one group, not added to the sums yet
        self._after_copies: Any = None  # the event that FSDP2 recorded after it copied them

    @property
    def sums(self) -> Mapping[nn.Parameter, torch.Tensor]:
        """The sums so far, this rank's shards in `dtype`; empty between optimizer steps."""
        self._sum_copied()
        return self._sums

    @property
    def is_watching(self) -> bool:
        """Whether `watch` was called, and `forget` was not called since."""
        return bool(self._handles or self._offloaded)

    def forget(self) -> None:
        """Undo `watch`."""
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
        self._add(cast(nn.Parameter, parameter), shard)

    def take(self, parameters: Sequence[nn.Parameter], event: Any) -> None:
        """Take the gradients of a group with offloaded shards, and add them to the sums later.

        See [Note: Offloaded shards].

        Args:
            parameters: the group's. Parameters that are not watched, or have no gradient, are ignored.
            event: after which `parameter.grad` holds its values. None if the values are there already.
        """
        taken = [parameter for parameter in parameters if parameter in self._offloaded and parameter.grad is not None]
        if taken:
            self._sum_copied()
            self._copied = [(parameter, cast(DTensor, parameter.grad).to_local()) for parameter in taken]
            self._after_copies = event
        for parameter in taken:
            parameter.grad = None

    def _sum_copied(self) -> None:
        """Add the last gradients of `take` to the sums."""
        if self._after_copies is not None:
            self._after_copies.synchronize()
        for parameter, shard in self._copied:
            self._add(parameter, shard)
        self._copied, self._after_copies = [], None

    def _add(self, parameter: nn.Parameter, shard: torch.Tensor) -> None:
        if parameter in self._sums:
            self._sums[parameter].add_(shard)  # computed in fp32, rounded once
        else:
            self._sums[parameter] = shard.to(self.dtype)

    def flush(self) -> None:
        """Put the sums into `parameter.grad`, as fp32 DTensors, and forget them."""
        self._sum_copied()
        for parameter, total in self._sums.items():
            sharded = cast(DTensor, parameter)
            parameter.grad = DTensor.from_local(
                total.to(parameter.dtype),
                sharded.device_mesh,
                sharded.placements,
                run_check=False,
                shape=sharded.shape,
                stride=sharded.stride(),
            )
        self._sums.clear()

"""Gradient accumulation of sharded gradients in another dtype than fp32 (stages 2 and 3).

FSDP2 adds each micro-batch's reduced shard to `parameter.grad`, which has the parameter's dtype. To accumulate in a
lower dtype, `ShardAccumulator` moves `parameter.grad` into a buffer of that dtype after every reduction, and sets
`parameter.grad` from the buffer at the end of the optimizer step.
"""

from collections.abc import Iterable, Mapping
from typing import cast

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

    @property
    def sums(self) -> Mapping[nn.Parameter, torch.Tensor]:
        """The sums so far, this rank's shards in `dtype`; empty between optimizer steps."""
        return self._sums

    @property
    def is_watching(self) -> bool:
        """Whether `watch` was called, and `forget` not since."""
        return bool(self._handles)

    def forget(self) -> None:
        """Undo `watch`."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def discard(self, parameters: Iterable[nn.Parameter]) -> None:
        """Release the sums of these parameters."""
        for parameter in parameters:
            self._sums.pop(parameter, None)

    def drop(self) -> None:
        """Release the sums of an optimizer step that is discarded."""
        self._sums.clear()

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Accumulate the gradients of sharded, trainable parameters after every reduction from now on.

        FSDP2 runs these hooks itself, once per reduction, with the sharded fp32 gradient in `parameter.grad`. Call
        before each backward, so that parameters unfrozen in between are included.
        """
        for parameter in parameters:
            if parameter.requires_grad and isinstance(parameter, DTensor) and parameter not in self._handles:
                register = parameter.register_post_accumulate_grad_hook
                self._handles[parameter] = register(self._take)  # type: ignore[no-untyped-call]

    def _take(self, parameter: torch.Tensor) -> None:
        shard = cast(DTensor, parameter.grad).to_local()  # sharded fp32
        if shard.device.type != self.device_type:
            # On torch 2.11, FSDP2 calls this while the copy to an offloaded shard may still be under way.
            torch.accelerator.current_stream().synchronize()
        parameter.grad = None
        key = cast(nn.Parameter, parameter)
        if key in self._sums:
            self._sums[key].add_(shard)  # computed in fp32, rounded once
        else:
            self._sums[key] = shard.to(self.dtype)

    def flush(self) -> None:
        """Put the sums into `parameter.grad`, as fp32 DTensors, and forget them."""
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

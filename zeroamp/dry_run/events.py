"""The events of a micro-batch, and their recorder: storages that come and go, ops, and points at which FSDP2 acts."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from zeroamp.hooks._torch.dispatch import TorchDispatchMode, count_op_flops, is_view_op, run_op, storage_key
from zeroamp.hooks._torch.dtensor import is_wrapper, without_wrapper
from zeroamp.hooks.tensors import tensors_in
from zeroamp.planning.fsdp_replay import Replay

Kind = Literal["activations", "workspace", "unsharded gradients"]
"""Activations are made in the forward and outlive it. The workspace is what is neither an activation nor a gradient."""

Point = Literal["begin forward", "end forward", "begin backward", "end backward"]

MAX_MICRO_BATCHES = 3
"""Of more micro-batches the first, one from the middle and the last are replayed: those in between are alike."""

_ATTENTION_FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"  # torch's counter knows the accelerators' only


@dataclass(frozen=True, slots=True)
class Mark:
    """A unit begins or ends its forward or backward there; "" is the root."""

    point: Point
    unit: str

    def reach(self, replay: Replay, *, is_last: bool) -> None:
        """Let the replay do what FSDP2 does at this point; `is_last`: in the last micro-batch of the step."""
        if self.point == "begin forward":
            replay.begin_forward(self.unit)
        elif self.point == "end forward":
            replay.end_forward(self.unit)
        elif self.point == "begin backward":
            replay.begin_backward(self.unit)
        else:
            replay.end_backward(self.unit, is_last=is_last)


@dataclass(slots=True)
class Change:
    """A storage is allocated (bytes above 0) or freed (below 0)."""

    num_bytes: int
    kind: Kind = "workspace"
    param: str = ""
    """Of a gradient: the FQN of its parameter."""
    unit: str = field(default="", compare=False)
    """The unit whose forward was running."""


@dataclass(frozen=True, slots=True)
class GradientReady:
    """Autograd has added a gradient of so many bytes to what its parameter has."""

    param: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Op:
    """What an op computes and moves."""

    flops: int
    """Of a matrix product, a convolution or an attention; 0 for all else."""
    is_low: bool
    """Whether it computes in 16 bits."""
    num_bytes: int
    """Of the tensors that it reads and writes, each once."""


Event = Mark | Change | GradientReady | Op


class EventRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every storage that comes and goes while it is on, and every op. Returns the ops' results unchanged."""

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        """Take the tensors that exist before: they are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.unit = ""
        """Whose forward is running."""
        self.is_forward = True
        self._births: dict[int, Change] = {}
        self._watched: dict[int, Any] = {}  # the weak references, which must live
        self._existing = {storage_key(without_wrapper(tensor)) for tensor in existing}

    def mark(self, point: Point, unit: str) -> None:
        """Record that a point was reached."""
        self.events.append(Mark(point, unit))

    def end_forward(self) -> None:
        """Make activations of what the forward allocated and has not freed."""
        self.is_forward = False
        for change in self._births.values():
            change.kind = "activations"

    def gradient_ready(self, param: str, gradient: torch.Tensor | None) -> None:
        """Record that autograd has put `gradient` into a parameter, which holds it from now on."""
        birth = None if gradient is None else self._births.get(storage_key(without_wrapper(gradient)))
        if birth is None:
            raise AssertionError(f"expected a gradient that the backward of {param} made, got {gradient}")
        birth.kind, birth.param = "unsharded gradients", param
        self.events.append(GradientReady(param, birth.num_bytes))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op and record its new storages. Of an op on DTensors, record those of the ops on their local parts."""
        kwargs = kwargs or {}
        if any(map(is_wrapper, types)):
            return NotImplemented
        result = _run(func, args, kwargs)
        outputs = [without_wrapper(tensor) for tensor in tensors_in(result)]
        for output in outputs:
            self._record(output)
        if outputs and not is_view_op(func):
            inputs = list(tensors_in((args, kwargs)))
            moved = {storage_key(tensor): tensor.nbytes for tensor in (*inputs, *outputs)}
            is_low = any(tensor.is_floating_point() and tensor.itemsize == 2 for tensor in inputs)
            self.events.append(Op(_flops(func, args, kwargs, result), is_low, sum(moved.values())))
        return result

    def _record(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key in self._births or key in self._existing:
            return
        birth = self._births[key] = Change(storage.nbytes(), unit=self.unit)
        self.events.append(birth)
        self._watched[key] = weakref.ref(storage, lambda _: self._record_end(key))

    def _record_end(self, key: int) -> None:
        self._watched.pop(key)
        birth = self._births.pop(key)
        self.events.append(Change(-birth.num_bytes, birth.kind, birth.param, birth.unit))


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op. Of a group norm with fp32 weights, fake tensors have the input's gradient in fp32; kernels do not."""
    result = run_op(func, args, kwargs)
    if func.overloadpacket.__name__ == "native_group_norm_backward" and result[0] is not None:
        return (result[0].to(args[1].dtype), *result[1:])
    return result


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return torch's count for the op: 2 per multiply-add, a causal attention counted whole.

    Attention on the CPU is counted as on an accelerator: two products of batch x heads x queries x keys x width each
    in the forward, and five in the backward, which computes the scores again.
    """
    packet = func.overloadpacket
    if packet.__name__.startswith(_ATTENTION_FOR_CPU):
        is_backward = packet.__name__.endswith("_backward")
        query, key = args[1:3] if is_backward else args[:2]
        batch, heads, num_queries, width = query.shape
        return (5 if is_backward else 2) * 2 * int(batch * heads * num_queries * key.shape[2] * width)
    return count_op_flops(func, args, kwargs, result)

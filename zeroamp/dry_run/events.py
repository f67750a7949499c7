"""The events of a micro-batch and their recorder: allocations, frees, and the points where FSDP2 acts."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from zeroamp.hooks._torch.dispatch import TorchDispatchMode, run_op, storage_key
from zeroamp.hooks._torch.dtensor import is_wrapper, without_wrapper
from zeroamp.hooks.tensors import tensors_in

Kind = Literal["activations", "workspace", "unsharded gradients"]
"""Activations are allocated in the forward and still exist at its end. All else, except gradients, is workspace."""

Point = Literal["begin forward", "end forward", "begin backward", "end backward"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A unit begins or ends its forward or backward here. The unit "" is the root."""

    point: Point
    unit: str


@dataclass(slots=True)
class Change:
    """A storage is allocated (bytes above 0) or freed (below 0)."""

    num_bytes: int
    kind: Kind = "workspace"
    param: str = ""
    """FQN of the parameter, if this is a gradient; else ""."""


@dataclass(frozen=True, slots=True)
class GradientReady:
    """Autograd has accumulated a gradient of `num_bytes` into its parameter."""

    param: str
    num_bytes: int


Event = Mark | Change | GradientReady


class EventRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every allocation and free while it is active. The ops return their results unchanged."""

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        """`existing`: tensors whose storages are not recorded."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.is_forward = True
        self._births: dict[int, Change] = {}
        self._watched: dict[int, Any] = {}  # the weak references, which must live
        self._existing = {storage_key(without_wrapper(tensor)) for tensor in existing}

    def mark(self, point: Point, unit: str) -> None:
        """Record that the run has reached a point of a unit."""
        self.events.append(Mark(point, unit))

    def end_forward(self) -> None:
        """Classify what the forward allocated and has not freed as activations."""
        self.is_forward = False
        for change in self._births.values():
            change.kind = "activations"

    def gradient_ready(self, param: str, gradient: torch.Tensor | None) -> None:
        """Record that autograd has accumulated `gradient` into a parameter."""
        birth = None if gradient is None else self._births.get(storage_key(without_wrapper(gradient)))
        if birth is None:
            raise AssertionError(f"expected a gradient that the backward of {param} made, got {gradient}")
        birth.kind, birth.param = "unsharded gradients", param
        self.events.append(GradientReady(param, birth.num_bytes))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op, and record its new storages. Of DTensors, the ops on their local parts are recorded."""
        kwargs = kwargs or {}
        if any(map(is_wrapper, types)):
            return NotImplemented
        result = _run(func, args, kwargs)
        for tensor in tensors_in(result):
            self._record(without_wrapper(tensor))
        return result

    def _record(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key in self._births or key in self._existing:
            return
        birth = self._births[key] = Change(storage.nbytes())
        self.events.append(birth)
        self._watched[key] = weakref.ref(storage, lambda _: self._record_end(key))

    def _record_end(self, key: int) -> None:
        self._watched.pop(key)
        birth = self._births.pop(key)
        self.events.append(Change(-birth.num_bytes, birth.kind, birth.param))


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op. Corrects the fake backward of group norm, which ignores the input's dtype if weights are fp32."""
    result = run_op(func, args, kwargs)
    if func.overloadpacket.__name__ == "native_group_norm_backward" and result[0] is not None:
        return (result[0].to(args[1].dtype), *result[1:])
    return result

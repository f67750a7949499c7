"""Records which memory the ops of a run take and give back, and what they compute."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from zeroamp.dry_run.events import ACTIVATIONS, UNSHARDED_GRADIENTS, Change, Event, GradientReady, Mark, Op, Point
from zeroamp.hooks._torch.dispatch import TorchDispatchMode, is_view_op, storage_key
from zeroamp.hooks.tensors import tensors_in

_ATTENTION_FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"  # torch's counter knows the accelerators' only


class MemoryRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every storage that comes and goes while it is on, and every op. Returns the ops' results unchanged."""

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        """Take the tensors that are there before: they are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.unit = ""
        """Whose forward is running."""
        self.is_forward = True
        self._births: dict[int, Change] = {}
        self._watched: dict[int, Any] = {}  # the weak references, which must live
        self._existing = {storage_key(tensor) for tensor in existing}

    def mark(self, point: Point, unit: str) -> None:
        """Note that a point was reached."""
        self.events.append(Mark(point, unit))

    def end_of_forward(self) -> None:
        """Say that what is alive now and was made by the run is an activation."""
        self.is_forward = False
        for change in self._births.values():
            change.kind = ACTIVATIONS

    def gradient_ready(self, gradient: torch.Tensor, param: str) -> None:
        """Say that autograd has put `gradient` into a parameter, which holds it from now on."""
        birth = self._births.get(storage_key(gradient))
        if birth is None:
            raise AssertionError(f"expected a gradient that the backward of {param} made, got one from before")
        birth.kind, birth.param = UNSHARDED_GRADIENTS, param
        self.events.append(GradientReady(param, birth.num_bytes))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op and note its new storages."""
        del types
        kwargs = kwargs or {}
        result = _run(func, args, kwargs)
        outputs = list(tensors_in(result))
        if not outputs:
            return result
        for output in outputs:
            self._see(output)
        if not is_view_op(func):
            inputs = list(tensors_in((args, tuple(kwargs.values()))))
            self.events.append(_op(func, args, kwargs, result, inputs, outputs))
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key in self._births or key in self._existing:
            return
        birth = self._births[key] = Change(storage.nbytes(), unit=self.unit)
        self.events.append(birth)
        self._watched[key] = weakref.ref(storage, lambda _: self._gone(key))

    def _gone(self, key: int) -> None:
        self._watched.pop(key)
        birth = self._births.pop(key)
        self.events.append(Change(-birth.num_bytes, birth.kind, birth.param, birth.unit))


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op. Of a group norm with fp32 weights, fake tensors have the input's gradient in fp32; kernels do not."""
    result = func(*args, **kwargs)
    if func.overloadpacket.__name__ == "native_group_norm_backward" and result[0] is not None:
        return (result[0].to(args[1].dtype), *result[1:])
    return result


def _op(func: Any, args: Any, kwargs: Any, result: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Op:
    moved = {storage_key(tensor): tensor.nbytes for tensor in (*inputs, *outputs)}
    is_low = any(tensor.is_floating_point() and tensor.itemsize == 2 for tensor in inputs)
    return Op(_flops(func, args, kwargs, result), is_low, sum(moved.values()))


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
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))

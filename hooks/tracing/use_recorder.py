"""Records how each parameter is used while a model runs, to find those that are only ever cast to a low dtype.

Autocast casts at a higher dispatch key than the one of a `TorchDispatchMode`. So the mode gets each cast as
`aten._to_copy(parameter, dtype=low)`, before the op that reads the cast, also for composite ops. A parameter is *safe*
if only such casts read its values. All-gathered in the low dtype, it gives the same bits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from zeroamp.hooks._torch.dispatch import StorageWeakRef, TorchDispatchMode, is_view_op, run_op, storage_of
from zeroamp.hooks.precision.autocast_ops import running_cast
from zeroamp.hooks.tensors import tensors_in
from zeroamp.hooks.tracing.parameter_record import ParameterRecord

_MOVES = frozenset({"clone", "cat", "stack", "slice_backward", "select_backward"})
"""Ops that copy values unchanged, and at most add zeros around them. Rounding before or after such an op gives the same
values. So the uses of the copy count as uses of the parameter."""

_FACTORIES = frozenset(
    {f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")}
    | {f"new_{kind}" for kind in ("empty", "empty_strided", "zeros", "ones", "full")}
)
"""Ops that read a tensor's shape and dtype, not its values."""


class UseRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every use of the parameters given to `add`. The results of the ops are not changed."""

    def __init__(self, dtype: torch.dtype, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: dict[str, ParameterRecord] = {}
        self.modules_called: set[str] = set()
        # The ops that compute, each with the dtypes of its inputs. Runs with equal programs compute the same values.
        self.program: list[str] = []
        self.has_run_backward = False
        self.cast_modules: set[str] = set()
        """FQNs of the modules in whose forward an argument of an op of `autocast_ops` was cast."""
        self._dtype = dtype
        self._fqns = {id(module): fqn for fqn, module in model.named_modules()}
        self._calls: list[str] = []  # FQNs of the modules that are in their forward, outermost first
        self._carriers: dict[StorageWeakRef, frozenset[str]] = {}  # storage with unrounded values -> parameters' FQNs
        self._copies: set[StorageWeakRef] = set()  # those of the carriers that are copies
        self._rounded: set[StorageWeakRef] = set()  # other tensors that were cast to a dtype of fewer bits
        self._widened: set[StorageWeakRef] = set()  # tensors that were cast from the low dtype

    def add(self, name: str, parameter: torch.Tensor, replacement: torch.Tensor) -> None:
        """Record the uses of a parameter: of its replacement in the run, and of itself (in a closure, for example)."""
        record = self.records[name] = ParameterRecord(parameter)
        for tensor in (parameter, replacement):
            if (storage := storage_of(tensor)) is not None:
                self._carriers[storage] = self._carriers.get(storage, frozenset()) | {name}
        if replacement.requires_grad:
            note = partial(self._note_gradient, record)
            replacement.register_hook(note)  # type: ignore[no-untyped-call]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Record all uses inside the context, and the module in whose forward each is."""
        handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        try:
            with self, DtypeReads(self.note_dtype_read):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def note_outputs(self, outputs: Any) -> None:
        """Record parameters among the outputs as read, because the caller may read their values."""
        for tensor in tensors_in(outputs):
            self._note_reads([tensor], "the model's output")

    def note_dtype_read(self, tensor: torch.Tensor) -> None:
        """Record that the model read the dtype of a parameter: all-gathered in the low dtype, it would be another."""
        for name in self._owners(tensor):
            self.records[name].dtype_read_in = self.records[name].dtype_read_in or self._here()

    def safety(self) -> dict[str, tuple[bool, str]]:
        """Return (whether it is safe, the reason) for every parameter, by FQN."""
        return {
            name: record.safety(self._dtype, with_backward=self.has_run_backward)
            for name, record in self.records.items()
        }

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op and record it."""
        kwargs = kwargs or {}
        out = run_op(func, args, kwargs)
        if func.namespace != "prim":  # FakeTensorMode calls prim.device and the like
            self._note(func, list(tensors_in((args, kwargs))), out)
        return out

    def _note(self, func: torch._ops.OpOverload, inputs: list[torch.Tensor], out: Any) -> None:
        name = func.overloadpacket.__name__
        if is_view_op(func):
            return  # a view has the storage of its base
        if name == "_to_copy":
            if running_cast() is not None and self._calls:
                self.cast_modules.add(self._calls[-1])
            self._note_cast(inputs[0], out)
        elif name in _MOVES:
            self._note_move(inputs, out, name)
        elif name in _FACTORIES:
            self.note_dtype_read(inputs[0])
        else:
            self.program.append(f"{func} of {', '.join(str(tensor.dtype) for tensor in inputs)}")
            self._note_reads(inputs, f"{func.namespace}.{name}")

    def _note_reads(self, inputs: list[torch.Tensor], op: str) -> None:
        for tensor in inputs:
            for name in self._owners(tensor):
                self.records[name].reads.append(f"{op} in {self._here()}")

    def _note_move(self, inputs: list[torch.Tensor], out: torch.Tensor, op: str) -> None:
        if (storage := storage_of(out)) is None or any(tensor.dtype.itemsize > out.dtype.itemsize for tensor in inputs):
            return self._note_reads(inputs, f"aten.{op}")
        if owners := frozenset().union(*(self._owners(tensor) for tensor in inputs)):
            self._carriers[storage] = owners
            self._copies.add(storage)
        storages = [storage_of(tensor) for tensor in inputs]
        if any(source in self._rounded for source in storages):
            self._rounded.add(storage)
        if all(source in self._widened for source in storages):
            self._widened.add(storage)
        return None

    def _note_cast(self, source: torch.Tensor, out: torch.Tensor) -> None:
        if owners := self._owners(source):
            if out.dtype == self._dtype:
                for name in owners:
                    self._note_cast_of(self.records[name], source)
            elif out.dtype == source.dtype:
                self._note_move([source], out, "_to_copy")
            else:
                self._note_reads([source], f"aten._to_copy to {out.dtype}")
        elif source.dtype.is_floating_point and (storage := storage_of(out)) is not None:
            if out.dtype.itemsize < source.dtype.itemsize:
                self._rounded.add(storage)
            elif source.dtype == self._dtype and out.dtype.itemsize > source.dtype.itemsize:
                self._widened.add(storage)
                # Not recorded in the backward: its casts mirror the forward's, except that of a parameter's gradient.
                if storage_of(source) in self._rounded and not self.has_run_backward:
                    self.program.append("a round trip through fewer bits")

    def _note_cast_of(self, record: ParameterRecord, source: torch.Tensor) -> None:
        op = running_cast()
        record.casts.append(self._here())
        record.cast_by.add(op or "")
        if torch.is_grad_enabled():
            extents = record.recomputed_extents if self.has_run_backward else record.extents
        else:
            extents = record.extents_without_grad
        is_copy = storage_of(source) in self._copies
        extents.append(None if is_copy else (int(source.storage_offset()), tuple(source.size()), source.stride()))

    def _note_gradient(self, record: ParameterRecord, gradient: torch.Tensor) -> None:
        record.gradients.append(storage_of(gradient) in self._widened)

    def _owners(self, tensor: torch.Tensor) -> frozenset[str]:
        return self._carriers.get(storage, frozenset()) if (storage := storage_of(tensor)) is not None else frozenset()

    def _here(self) -> str:
        if self._calls:
            return self._calls[-1] or "the root"
        return "the backward" if self.has_run_backward else "the root"

    def _enter_module(self, module: nn.Module, _args: Any) -> None:
        # A module that is not in the tree counts as its caller.
        fqn = self._fqns.get(id(module), self._calls[-1] if self._calls else "")
        self._calls.append(fqn)
        self.modules_called.add(fqn)

    def _leave_module(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._calls.pop()


_DTYPE_ATTRIBUTES = frozenset({"dtype", "itemsize", "nbytes"})
_READ_DTYPES_OF_ALL = frozenset({"can_cast", "element_size", "result_type", "type"})
_READ_DTYPE_OF_SECOND = frozenset({"to", "type_as"})
"""`x.to(weight)` reads the dtype of `weight`, not of `x`."""


class DtypeReads(TorchFunctionMode):
    """Calls `note` with every tensor whose dtype is read. Such reads do not reach the dispatcher.

    The results of the functions are not changed.
    """

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function, after `note` of the tensors whose dtype it reads."""
        kwargs = kwargs or {}
        if running_cast() is None:  # the cast of `zeroamp.autocast_ops` reads dtypes, not the model
            read = _dtype_read_of(func, [*args, *kwargs.values()])
            for tensor in (value for value in read if isinstance(value, torch.Tensor)):
                self._note(tensor)
        return func(*args, **kwargs)


def _dtype_read_of(func: Any, arguments: list[Any]) -> list[Any]:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return arguments[:1] if func.__self__.__name__ in _DTYPE_ATTRIBUTES else []
    if name in _READ_DTYPE_OF_SECOND:
        return arguments[1:]
    return arguments if name in _READ_DTYPES_OF_ALL else []

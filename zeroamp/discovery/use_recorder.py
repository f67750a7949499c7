"""Records how each parameter is used while a model runs, to find those that are only ever cast to a low dtype.

Autocast casts at a higher dispatch key than the one of a `TorchDispatchMode`. So the mode gets each cast as
`aten._to_copy(parameter, dtype=low)`, before the op that reads the cast, also for composite ops. A parameter is *safe*
if only such casts, of the parameter or of its views, read its values. All-gathered in the low dtype, it gives the same
bits. Every other use is undecided, and the parameter stays in fp32:

* any other op, a copy of the parameter included;
* a read of its dtype, if the model runs other ops with the low dtype: see `data_flow`;
* an assignment to its `data`, as `module.to(dtype)` makes in the forward: FSDP2's gradients would get that dtype;
* a gradient that is not cast from the low dtype, as a whole or by the parts of one `split`. If the parameter was cast
  several times, autograd adds the gradients in fp32. All-gathered in the low dtype, it would add them in that dtype.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from zeroamp.hooks._torch.dispatch import StorageWeakRef, is_in_backward, is_view_op, storage_of
from zeroamp.hooks.observers.tracing import DtypeReads, OpRecorder
from zeroamp.hooks.tensors import tensors_in
from zeroamp.policies.dtypes import short_name, stored_dtype
from zeroamp.policies.errors import some_of

MOVES = frozenset({"cat", "clone", "slice_backward", "select_backward"})
"""Ops that copy values of gradients unchanged, and at most add zeros around them. `cat` joins those of the parts of a
parameter, as `nn.MultiheadAttention` splits its `in_proj_weight`."""


@dataclass(slots=True)
class ParameterRecord:
    """The uses of one parameter in one run."""

    parameter: torch.Tensor
    reads: list[str] = field(default_factory=list)
    """"op in module" for each op that reads the parameter's values and is not a cast to the low dtype."""
    dtype_read_in: str | None = None
    """The FQN of a module that read the parameter's dtype; None if no module did."""
    assigned_in: str | None = None
    """The FQN of a module in which `parameter.data` was assigned, as `module.to(dtype)` does; None if in no module."""
    casts: list[str] = field(default_factory=list)
    """The FQN of the module, for each cast to the low dtype."""
    gradients: list[bool] = field(default_factory=list)
    """For each gradient: whether it was cast from the low dtype, as one or in parts. It then fits into that dtype."""

    def safety(self, dtype: torch.dtype, *, ignore_dtype_read: bool = False) -> tuple[bool, str]:
        """Return whether a run has the same bits if the parameter is all-gathered in `dtype`, and the reason."""
        low, storage = short_name(dtype), stored_dtype(self.parameter)
        if self.assigned_in is not None:
            return False, f"not safe: its module is cast, or its data assigned, in {self.assigned_in}"
        if storage == dtype:
            return True, f"safe: stored in {low}"
        if not storage.is_floating_point:
            return False, f"not safe: {short_name(storage)} is not a floating-point dtype"
        if self.reads:
            return False, f"not safe: read in {short_name(storage)} by {some_of(self.reads, 1)}"
        if self.dtype_read_in is not None and not ignore_dtype_read:
            return False, f"not safe: its dtype is read in {self.dtype_read_in}, and {low} leads to other ops or dtypes"
        if not self.casts:
            return False, "not safe: never used in the traced run"
        cast = f"cast to {low} in {', '.join(dict.fromkeys(self.casts))}"
        if self.parameter.requires_grad and self.gradients != [True]:
            return False, f"not decided, so not safe: {cast}, but its gradient is not one cast from {low}"
        return True, f"safe: {cast}"


class UseRecorder(OpRecorder):
    """Records every use of the parameters given to `add`. The results of the ops are not changed."""

    def __init__(self, dtype: torch.dtype, model: nn.Module) -> None:
        super().__init__()
        self.records: dict[str, ParameterRecord] = {}
        self._dtype = dtype
        self._fqns = {id(module): fqn for fqn, module in model.named_modules()}
        self._calls: list[str] = []  # FQNs of the modules that are in their forward, outermost first
        self._by_storage: dict[StorageWeakRef, list[ParameterRecord]] = {}
        self._widened: set[StorageWeakRef] = set()  # tensors that were cast from the low dtype

    def add(self, name: str, parameter: torch.Tensor, replacement: torch.Tensor) -> None:
        """Record the uses of a parameter: of its replacement in the run, and of itself (in a closure, for example)."""
        record = self.records[name] = ParameterRecord(parameter)
        for tensor in (parameter, replacement):
            if (storage := storage_of(tensor)) is not None:
                self._by_storage.setdefault(storage, []).append(record)
        if replacement.requires_grad:
            replacement.register_hook(partial(self._note_gradient, record))  # type: ignore[no-untyped-call]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Record all uses inside the context, and the module in whose forward each is."""
        handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        try:
            with self, DtypeReads(self._note_dtype_read, self._note_assignment):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def note_outputs(self, outputs: Any) -> None:
        """Record parameters among the outputs as read, because the caller may read their values."""
        self._note_reads(list(tensors_in(outputs)), "the model's output")

    def see(self, func: Any, arguments: Any, out: Any) -> None:
        """Record the casts and reads of parameters by an op."""
        if is_view_op(func):
            return  # a view has the storage of its base
        name, inputs = func.overloadpacket.__name__, list(tensors_in(arguments))
        if name == "_to_copy" and out.dtype == self._dtype and (records := self._records_of(inputs[0])):
            for record in records:
                record.casts.append(self._here())
            return
        self._note_widened(name, inputs, out)
        self._note_reads(inputs, f"{func.namespace}.{name}")

    def _note_widened(self, name: str, inputs: list[torch.Tensor], out: Any) -> None:
        if name == "_to_copy":
            is_widened = inputs[0].dtype == self._dtype and out.dtype.itemsize > self._dtype.itemsize
        else:
            is_widened = name in MOVES and all(storage_of(tensor) in self._widened for tensor in inputs)
        for storage in filter(None, map(storage_of, tensors_in(out))):
            if is_widened:
                self._widened.add(storage)
            else:
                self._widened.discard(storage)

    def _note_reads(self, inputs: list[torch.Tensor], op: str) -> None:
        for record in (record for tensor in inputs for record in self._records_of(tensor)):
            record.reads.append(f"{op} in {self._here()}")

    def _note_dtype_read(self, tensor: torch.Tensor, result: Any) -> Any:
        for record in self._records_of(tensor):
            record.dtype_read_in = self._here()
        return result

    def _note_assignment(self, tensor: torch.Tensor) -> None:
        for record in self._records_of(tensor):
            record.assigned_in = self._here()

    def _note_gradient(self, record: ParameterRecord, gradient: torch.Tensor) -> None:
        record.gradients.append(storage_of(gradient) in self._widened)

    def _records_of(self, tensor: torch.Tensor) -> list[ParameterRecord]:
        """Return the records of the parameters whose values a tensor contains: a view has the storage of its base."""
        storage = storage_of(tensor)
        return self._by_storage.get(storage, []) if storage is not None else []

    def _here(self) -> str:
        if self._calls:
            return self._calls[-1] or "the root"
        return "the backward" if is_in_backward() else "the root"

    def _enter_module(self, module: nn.Module, _args: Any) -> None:
        # A module that is not in the tree counts as its caller.
        self._calls.append(self._fqns.get(id(module), self._calls[-1] if self._calls else ""))

    def _leave_module(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._calls.pop()

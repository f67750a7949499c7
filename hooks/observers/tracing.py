"""Passes each op of a run, and each read of a tensor's dtype, to a recorder.

| recorder | of | records |
|---|---|---|
| `zeroamp.discovery.use_recorder` | a model on fake tensors | the uses of each parameter, for "auto" |
| `zeroamp.discovery.data_flow` | the same | a hash of what each op computes |
| `zeroamp.dry_run.traced_micro_batch` | the same | allocations and frees, for `zeroamp plan` |
| `zeroamp.hooks.observers.observed_dtypes` | a wrapped model | compute dtypes, for `Ledger.verify` |
| `zeroamp.ledger.dtype_reads` | the same, in another run | weights whose dtype the model reads |
| `zeroamp.measured_precision.switch` | the same, in fp32 | FLOPs of groups of modules, for `sensitivity` |
| `zeroamp.cli.observed` | a script | bytes of collectives, for `zeroamp compare` |
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from zeroamp.hooks._torch.dispatch import TorchDispatchMode, run_op


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows each op to `see` while it is active. The ops return their results unchanged."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def see(self, func: Any, arguments: Any, out: Any) -> None:
        """Record an op that has run on `arguments`, which are (args, kwargs), and has returned `out`."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the op, and show it to `see`."""
        kwargs = kwargs or {}
        out = run_op(func, args, kwargs)
        if func.namespace != "prim":  # FakeTensorMode calls prim.device and the like
            self.see(func, (args, kwargs), out)
        return out


_DTYPE_ATTRIBUTES = frozenset({"dtype", "itemsize", "nbytes"})
_READ_DTYPES_OF_ALL = frozenset({"can_cast", "element_size", "result_type", "type"})
_READ_DTYPE_OF_SECOND = frozenset({"to", "type_as"})
"""`x.to(weight)` reads the dtype of `weight`, not of `x`."""
_ASSIGN_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class DtypeReads(TorchFunctionMode):
    """Shows each read of a tensor's dtype while it is active. Such reads do not reach the dispatcher."""

    def __init__(
        self,
        answer: Callable[[torch.Tensor, Any], Any],
        note_assignment: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """`answer`: takes the tensor and the result of the function that reads its dtype, and returns the result.

        `note_assignment`: takes the tensor whose `data` is assigned. That does not reach the dispatcher either.
        """
        super().__init__()
        self._answer = answer
        self._note_assignment = note_assignment

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function, and return what `answer` makes of its result."""
        kwargs = kwargs or {}
        if self._note_assignment is not None and func == _ASSIGN_DATA:
            self._note_assignment(args[0])  # before it has another storage
        result = func(*args, **kwargs)
        for value in _dtype_read_of(func, [*args, *kwargs.values()]):
            if isinstance(value, torch.Tensor):
                result = self._answer(value, result)
        return result


def _dtype_read_of(func: Any, arguments: list[Any]) -> list[Any]:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return arguments[:1] if func.__self__.__name__ in _DTYPE_ATTRIBUTES else []
    if name in _READ_DTYPE_OF_SECOND:
        return arguments[1:]
    return arguments if name in _READ_DTYPES_OF_ALL else []

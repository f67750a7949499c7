"""Named ranges in traces: which unit or group the work belongs to, and in which dtype.

| range | what |
|---|---|
| `zeroamp::forward (blocks.0)` | a unit's forward, its parameters unsharded; `recompute`: repeated for the backward |
| `zeroamp::backward (blocks.0)` | a unit's backward, from its outputs' gradients to its inputs' |
| `zeroamp::all_gather (blocks.0 bf16)` | the all-gather of one group |
| `zeroamp::cast (blocks.0 -> bf16)` | its gradients, cast into the flat input of their reduction |
| `zeroamp::reduce_scatter (blocks.0 bf16, sum fp32)` | their reduction; inside it `sum (blocks.0 -> fp32)` |
| `zeroamp::all_reduce (blocks.0 fp32)` | over replicas |
| `zeroamp::norm`, `clip`, `optimizer (AdamW)` | of the step |

FSDP2's own ranges, `FSDP::...`, say which part of its work it is, and are not repeated.

[Note: Ranges across hooks]
What one hook opens and another closes is kept on a stack per thread, because autograd has threads of its own on
accelerators. Closing a range closes what was opened after it and is still open: what raised midway leaves nothing open
for longer than the range around it, and nothing at all past the next forward of the root. (Of a root whose forward
calls the root again, the outer range ends there.)

[Note: Backward ranges]
Hooks on a unit's outputs open its backward, hooks on its inputs close it. Autograd runs both inside its event of one
node (`autograd::engine::evaluate_function`), so the range begins and ends in the middle of two of those: `zeroamp
profile` moves its ends to where the nodes begin. A unit whose inputs need no gradient is closed when the next unit
begins or the backward ends.
"""

import threading
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from zeroamp.hooks._torch.dispatch import at_end_of_backward, is_in_backward, is_profiling, untraced
from zeroamp.hooks.tensors import tensors_in
from zeroamp.policies.policy import RangeMode

RANGE_PREFIX = "zeroamp::"
"""What the name of each range starts with."""

RangeKind = Literal[
    "all_gather",
    "all_reduce",
    "backward",
    "cast",
    "clip",
    "forward",
    "norm",
    "optimizer",
    "recompute",
    "reduce_scatter",
    "sum",
]

_OF_UNITS: tuple[RangeKind, ...] = ("backward", "forward", "recompute")
"""Kinds whose range is named after a module; the root, whose FQN is "", is called "root", as its group is."""

_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(slots=True, eq=False)
class OpenRange:
    """A range that was opened and has yet to be closed."""

    kind: RangeKind
    of: str
    record: record_function | None
    """What the profiler of torch has; None where none records."""


class _OpenRanges(threading.local):
    """Those of one thread, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[OpenRange] = []


class Ranges:
    """Opens and closes the ranges of one wrapped model. With nothing to record it does nothing."""

    def __init__(self, mode: RangeMode = "off") -> None:
        self._mode = mode
        self._open = _OpenRanges()
        self._begins: MutableMapping[torch.Tensor, list[str]] = WeakTensorKeyDictionary()
        """Output of a unit -> the units whose backward begins with its gradient, the outermost first."""

    @property
    def is_active(self) -> bool:
        """Whether a range that is opened now goes anywhere."""
        return self._mode == "nvtx" or (self._mode == "profiler" and is_profiling())

    def inside(self, kind: RangeKind, of: str = "") -> AbstractContextManager[None]:
        """Return a context that is a range around its body, also when that raises."""
        return self._around(kind, of) if self.is_active else _NOTHING

    @contextmanager
    def _around(self, kind: RangeKind, of: str) -> Iterator[None]:
        opened = self.open(kind, of)
        try:
            yield
        finally:
            self.close(opened)

    def open(self, kind: RangeKind, of: str = "") -> OpenRange | None:
        """Open a range, named after `kind` and what it works on; None if there is nothing to record."""
        if not self.is_active:
            return None
        what = of or ("root" if kind in _OF_UNITS else "")
        name = f"{RANGE_PREFIX}{kind} ({what})" if what else f"{RANGE_PREFIX}{kind}"
        if self._mode == "nvtx":
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        record = record_function(name) if is_profiling() else None
        if record is not None:
            record.__enter__()  # type: ignore[no-untyped-call]
        opened = OpenRange(kind, of, record)
        self._open.stack.append(opened)
        return opened

    def close(self, opened: OpenRange | None) -> None:
        """Close a range of this thread, and first those inside it. Nothing if it was closed already."""
        if opened in self._open.stack:
            while self._close_last() is not opened:
                pass

    def close_kind(self, kinds: tuple[RangeKind, ...], of: str) -> None:
        """Close the innermost open range of these kinds and that name, if there is one."""
        if self._open.stack:
            self.close(next((r for r in reversed(self._open.stack) if r.kind in kinds and r.of == of), None))

    def close_all(self) -> None:
        """Close what is open in this thread."""
        while self._open.stack:
            self._close_last()

    def begin_backward_at(self, output: torch.Tensor, fqn: str) -> None:
        """Open the backward of a unit when the gradient of its `output` is there.

        A unit that returns what one inside it returned is done later and begins earlier: one hook opens all.
        """
        fqns = self._begins.get(output)
        if fqns is None:
            fqns = self._begins[output] = []
            output.register_hook(partial(self._begin_backwards, fqns))  # type: ignore[no-untyped-call]
        fqns.insert(0, fqn)

    @untraced
    def _begin_backwards(self, fqns: list[str], _gradient: torch.Tensor) -> None:
        for fqn in fqns:
            if fqn:
                self.end_backwards(fqn)
                self.open("backward", fqn)
            elif self.is_active:
                at_end_of_backward(self.end_backwards)

    def end_backwards(self, fqn: str = "") -> None:
        """Close the innermost open backwards of units, up to one that contains the unit `fqn`."""
        stack = self._open.stack
        while stack and stack[-1].kind == "backward" and not _contains(stack[-1].of, fqn):
            self._close_last()

    def _close_last(self) -> OpenRange:
        opened = self._open.stack.pop()
        if opened.record is not None:
            opened.record.__exit__(None, None, None)
        if self._mode == "nvtx":
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        return opened


def _contains(outer: str, inner: str) -> bool:
    return outer == "" or inner.startswith(f"{outer}.")


class UnitRanges:
    """The ranges of one module of a unit: its forward, and its backward unless it is the root.

    The root's backward is around `loss.backward()`, which `TrainStep` calls. Inputs and outputs go on unchanged.
    """

    def __init__(self, ranges: Ranges, fqn: str) -> None:
        self._ranges = ranges
        self._fqn = fqn

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Register on `module`; return the handles. Call after FSDP2's hooks and those of the holders are there.

        After what unshards and before what reshards, so that the forward's range is the compute. `always_call`, so that
        it is closed when the forward raises.
        """
        return [
            module.register_forward_pre_hook(self._before, prepend=False, with_kwargs=True),
            module.register_forward_hook(self._after, prepend=True, always_call=True),
        ]

    @untraced
    def _before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._ranges.is_active:
            return
        is_recomputed = is_in_backward()
        if not self._fqn and not is_recomputed:
            self._ranges.close_all()  # see [Note: Ranges across hooks]
        self._ranges.open("recompute" if is_recomputed else "forward", self._fqn)
        if self._fqn:
            for tensor in _differentiable((args, kwargs)):
                tensor.register_hook(self._end_backward)  # type: ignore[no-untyped-call]

    @untraced
    def _after(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._ranges.close_kind(("forward", "recompute"), self._fqn)
        if self._ranges.is_active:
            for tensor in _differentiable(output):
                self._ranges.begin_backward_at(tensor, self._fqn)

    @untraced
    def _end_backward(self, _gradient: torch.Tensor) -> None:
        self._ranges.close_kind(("backward",), self._fqn)


def _differentiable(value: Any) -> Iterator[torch.Tensor]:
    if torch.is_grad_enabled():
        yield from (tensor for tensor in tensors_in(value) if tensor.requires_grad)

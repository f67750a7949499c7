"""Named ranges in traces. A name contains the unit or parameter group, and the dtype of its communication.

| range | what |
|---|---|
| `zeroamp::forward (blocks.0)` | a unit's forward, without unshard and reshard |
| `zeroamp::recompute (blocks.0)` | a forward that activation checkpointing repeats in the backward |
| `zeroamp::backward (blocks.0)` | a unit's backward, from the gradients of its outputs to those of its inputs |
| `zeroamp::all_gather (blocks.0 bf16)` | the all-gather of one group |
| `zeroamp::cast (blocks.0 -> bf16)` | the copy and cast of a group's gradients into the flat input of their reduction |
| `zeroamp::reduce_scatter (blocks.0 bf16, sum fp32)` | the reduction over shards |
| `zeroamp::sum (blocks.0 -> fp32)` | inside the reduction: the sum after an all-to-all |
| `zeroamp::all_reduce (blocks.0 fp32)` | the sum over replicas |
| `zeroamp::norm`, `clip`, `optimizer (AdamW)` | the gradient norm, clipping and the update of an optimizer step |

FSDP2's own ranges (`FSDP::...`) are in the trace too.

[Note: Ranges across hooks]
One hook opens a range, and another closes it. Open ranges are on a stack per thread, because autograd has threads of
its own on accelerators. Closing a range also closes all ranges that were opened after it and are still open. So an
exception leaves no range open for longer than the range around it. The next forward of the root closes all. (If the
root's forward calls the root again, the outer range ends at that call.)

[Note: Backward ranges]
Hooks on a unit's outputs open its backward range, hooks on its inputs close it. Autograd runs these hooks inside its
events of single nodes (`autograd::engine::evaluate_function`), so the range begins and ends in the middle of such
events. `zeroamp profile` moves both ends to the start of the node. If no input of a unit needs a gradient, its range is
closed when the backward of the next unit begins, or when the whole backward ends.
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
"""Prefix of the name of each range."""

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
"""Kinds whose range is named after a module. The root, whose FQN is "", is named "root"."""

_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(slots=True, eq=False)
class OpenRange:
    """A range that was opened and is not closed yet."""

    kind: RangeKind
    of: str
    """The name in parentheses: the FQN of a module, "" for the root, or a group's name and dtypes."""
    record: record_function | None
    """The profiler's event; None if no profiler was recording when the range was opened."""


class _OpenRanges(threading.local):
    """The stack of one thread's open ranges, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[OpenRange] = []


class Ranges:
    """Opens and closes the ranges of one wrapped model. Without NVTX or a recording profiler it does nothing."""

    def __init__(self, mode: RangeMode = "off") -> None:
        self._mode = mode
        self._open = _OpenRanges()
        self._begins: MutableMapping[torch.Tensor, list[str]] = WeakTensorKeyDictionary()
        """Output of a unit -> FQNs of the units whose backward begins with the output's gradient, outermost first."""

    @property
    def is_active(self) -> bool:
        """Whether a range that is opened now would be recorded."""
        return self._mode == "nvtx" or (self._mode == "profiler" and is_profiling())

    def inside(self, kind: RangeKind, of: str = "") -> AbstractContextManager[None]:
        """Return a context manager that opens a range, and closes it also if its body raises."""
        return self._around(kind, of) if self.is_active else _NOTHING

    @contextmanager
    def _around(self, kind: RangeKind, of: str) -> Iterator[None]:
        opened = self.open(kind, of)
        try:
            yield
        finally:
            self.close(opened)

    def open(self, kind: RangeKind, of: str = "") -> OpenRange | None:
        """Open the range `zeroamp::{kind} ({of})`, and return it. None if it would not be recorded."""
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
        """Close a range of this thread after all ranges inside it. Does nothing if the range is closed already."""
        if opened in self._open.stack:
            while self._close_last() is not opened:
                pass

    def close_kind(self, kinds: tuple[RangeKind, ...], of: str) -> None:
        """Close the innermost open range of one of these kinds with the name `of`, if there is one."""
        if self._open.stack:
            self.close(next((r for r in reversed(self._open.stack) if r.kind in kinds and r.of == of), None))

    def close_all(self) -> None:
        """Close all open ranges of this thread."""
        while self._open.stack:
            self._close_last()

    def begin_backward_at(self, output: torch.Tensor, fqn: str) -> None:
        """Open the backward range of the unit `fqn` when the backward reaches its `output`.

        A unit may return the output of a unit inside it. The outer one's forward ends later and its backward begins
        earlier. So one hook per output opens the ranges of all its units, the outermost first.
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
        """Close the open backward ranges from the innermost outwards, up to one whose unit contains the unit `fqn`."""
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
    """Opens and closes the forward range of one module, and its backward range unless the module is the root.

    `TrainStep` opens the root's backward range around `loss.backward()`. Inputs and outputs are not changed.
    """

    def __init__(self, ranges: Ranges, fqn: str) -> None:
        self._ranges = ranges
        self._fqn = fqn

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Register the hooks on `module`; return their handles. Call after FSDP2 and the typed groups have registered.

        The range opens after the unshard and closes before the reshard, so that it holds the computation only. With
        `always_call` it is also closed when the forward raises.
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

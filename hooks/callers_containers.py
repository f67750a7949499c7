"""Lets the forward of a unit work on its caller's own lists, dicts and objects, and not on copies of them.

Before a forward, FSDP2 replaces tensors in the arguments that need a gradient by aliases: see [Note: Aliases]. FSDP2,
and the casts of modes bf16 and fp16, copy the containers around such tensors. The caller would never see what a unit
wrote into a copy: the loss of a router, or states for the next block. So aliases and casts are written into the
caller's own containers (`Loan`), and taken out at the end of the forward.

Tensors that a unit adds to such a container are outputs of the unit, too. Their backward unshards the unit, as the
backward of its other outputs does.
"""

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zeroamp.hooks._torch.dispatch import untraced
from zeroamp.hooks.root_forward import ForwardCall
from zeroamp.hooks.tensors import Loan, map_arguments, may_have_tensors, tensors_in

Added = Callable[[list[torch.Tensor]], None]
"""Takes the tensors that a forward has added to the containers of its caller."""


class CallersContainers:
    """The loans of the forwards of one model that are running, the outermost first."""

    def __init__(self, *, copies_of_root: bool = False) -> None:
        """Make a stack of loans.

        copies_of_root: whether FSDP2 moves the inputs of the root to a device, and copies their containers for that.
        """
        self.copies_of_root = copies_of_root
        self._of_root: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None  # as the caller passed them
        self._open: list[tuple[nn.Module, Loan, list[torch.Tensor], Added | None]] = []

    def map_arguments(
        self,
        module: nn.Module,
        change: Callable[[torch.Tensor], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        added: Added | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with `change(tensor)` for each tensor, until the forward of `module` ends.

        At its end, `added` is called with the tensors in the containers that need a gradient and were not there before.
        """
        loan = Loan()
        args, kwargs = map_arguments(change, args, kwargs, loan)
        if loan.containers:
            before = [] if added is None else list(tensors_in(loan.containers))
            self._open.append((module, loan, before, added))
        return args, kwargs

    @untraced
    def end_forward(self, module: nn.Module, _args: object, _output: object) -> None:
        """End the loans of `module`, and all that were made later. A forward hook, called also after an error."""
        if self._open and any(module is each[0] for each in self._open):
            self._end(next(i for i, each in enumerate(self._open) if each[0] is module))

    def around_root(self, call: ForwardCall) -> "CallersContainers | None":
        """Return a context manager that ends all loans with the root's forward.

        A compiled unit calls no hook after an error.
        """
        if not call.is_outermost:
            return None
        if self.copies_of_root and may_have_tensors(call.args, call.kwargs):
            self._of_root = call.args, call.kwargs
        return self

    @untraced
    def take_inputs_of_root(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the containers that FSDP2 copied by the caller's. A pre-hook, with kwargs, right after FSDP2's."""
        if self._of_root is None:
            return args, kwargs
        own, self._of_root = self._of_root, None
        before, moved = _tensors(own), _tensors((args, kwargs))
        if len(before) != len(moved):
            return args, kwargs
        of = {id(tensor): other for tensor, other in zip(before, moved, strict=True)}
        added = self._open[-1][3] if self._open and self._open[-1][0] is root else None  # of the root's own group
        return self.map_arguments(root, lambda each: of.get(id(each), each), own[0], dict(own[1]), added)

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End all loans."""
        self._of_root = None
        self._end(0)

    def _end(self, first: int) -> None:
        while len(self._open) > first:
            _, loan, before, added = self._open.pop()
            if added is not None:
                added(_others(loan.containers, before))
            loan.end()


def _tensors(arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> list[torch.Tensor]:
    """Return the tensors that `map_arguments` changes, in order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_arguments(note, arguments[0], dict(arguments[1]))
    return found


def _others(containers: list[Any], before: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    known = {id(tensor) for tensor in before}
    found = {id(tensor): tensor for tensor in tensors_in(containers) if tensor.requires_grad}
    return [tensor for number, tensor in found.items() if number not in known]

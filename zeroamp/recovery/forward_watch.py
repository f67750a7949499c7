"""Notes a forward that raised, and lets none run after it until the ranks are together again."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks._torch.dispatch import untraced
from zeroamp.policies.errors import StepError, describe
from zeroamp.recovery.buffer_snapshot import KeptBuffers
from zeroamp.recovery.call_log import CallLog

Where = Literal["forward", "evaluation", "backward", "step", "the training loop", "optimizer.step", "recovery"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What raised on this rank. The text only: an exception would keep the tensors of its frames alive."""

    where: Where
    """"evaluation" is a forward without gradients, "the training loop" what is not the model's or the step's."""
    text: str

    def __str__(self) -> str:
        return f"{self.where} ({self.text})"

    @property
    def can_be_recovered(self) -> bool:
        """Whether parameters and process groups are known to be whole."""
        return self.where not in ("optimizer.step", "recovery")


def describe_error(error: BaseException | None) -> str:
    """Return an error's class and text, for another rank."""
    return "an error that was handled before recover()" if error is None else f"{type(error).__name__}: {error}"


class ForwardWatch:
    """Looks at the outermost forwards of a model, while its calls are recorded."""

    def __init__(self, calls: CallLog) -> None:
        self.failure: Failure | None = None
        """What raised since the last recovery; set by the step for what is not a forward."""
        self.window_has_begun = False
        """Whether a forward with gradients ran since the last window ended."""
        self._calls = calls
        self._buffers = KeptBuffers()
        self._around: list[BaseException | None] = []  # what was being handled around each forward that runs

    def attach(self, root: nn.Module) -> list[RemovableHandle]:
        """Register on the root, around what gathers; return the handles."""
        self._buffers.attach(root)
        return [
            root.register_forward_pre_hook(lambda _module, _args: self.enter(), prepend=True),
            # Called also when the forward raised, with the exception being handled.
            root.register_forward_hook(lambda _module, _args, _output: self.leave(), prepend=False, always_call=True),
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch a method that is registered as a forward."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @untraced
    def enter(self) -> None:
        """Note that a forward begins.

        Raises:
            StepError: after a failure.
        """
        self.refuse_after_failure("the model's forward")
        if self._calls.is_on and not self._around:
            self._begin()
        self._around.append(sys.exception())

    def _begin(self) -> None:
        if not torch.is_grad_enabled():
            self._calls.evaluation = []
        elif not self.window_has_begun:
            self._buffers.keep()
            self.window_has_begun = True

    @untraced
    def leave(self) -> None:
        """Note that it ended, or raised."""
        if not self._around:  # it was refused before it began
            return
        around, error = self._around.pop(), sys.exception()
        is_evaluation = self._calls.evaluation is not None
        if error is not None and error is not around and self._calls.is_on:
            self.note("evaluation" if is_evaluation else "forward", error)
        elif is_evaluation and not self._around:
            self._calls.end_evaluation()

    def note(self, where: Where, error: BaseException) -> None:
        """Keep the first failure: those after it follow from it."""
        if self.failure is None:
            self.failure = Failure(where=where, text=describe_error(error))

    def refuse_after_failure(self, method: str) -> None:
        """Raise StepError if something raised and the ranks were not brought together since."""
        if self.failure is None:
            return
        remedy = (
            "Call train.recover() on every rank, outside of the except block, and go on with the next window."
            if self.failure.can_be_recovered
            else "Restart from the last checkpoint."
        )
        found = f"an earlier failure in {self.failure}"
        raise StepError(describe(method, found, "one after train.recover(), or none that raised", remedy))

    def end_window(self) -> None:
        """Keep what this window left."""
        self._calls.end_window()
        self.window_has_begun = False

    def drop_window(self) -> None:
        """Forget this window and the failure in it, and forwards that a KeyboardInterrupt ended."""
        if self.window_has_begun:
            self._buffers.restore()
        self._calls.drop()
        self.failure, self.window_has_begun = None, False
        self._around.clear()

"""Records a forward that raised, and refuses further forwards until `TrainStep.recover` was called."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from zeroamp.hooks.root_forward import ForwardCall
from zeroamp.recovery.buffer_snapshot import BufferSnapshot
from zeroamp.recovery.call_log import CallLog
from zeroamp.training.micro_batches import MicroBatches
from zeroamp.wrapping.state import WrapState


class ForwardWatch:
    """Runs around the outermost forwards of a model, as the entry "recovery" of `RootForward`."""

    def __init__(self, state: WrapState, micro_batches: MicroBatches, calls: CallLog) -> None:
        self.has_begun = False
        """Whether a forward with gradients ran since the last optimizer step."""
        self._state = state
        self._micro_batches = micro_batches
        self._calls = calls
        self._buffers = BufferSnapshot(state.root)

    def around(self, call: ForwardCall) -> AbstractContextManager[None] | None:
        """Return the context manager for an outermost forward; None for any other.

        Raises:
            StepError: a forward, backward or step failed, and `TrainStep.recover` was not called since.
        """
        if self._state.is_observed:  # an observed step records nothing
            return None
        self._micro_batches.refuse_after_failure("The model's forward")
        return self._watch() if call.is_outermost else None

    @contextmanager
    def _watch(self) -> Iterator[None]:
        is_evaluation = not torch.is_grad_enabled()
        if is_evaluation:
            self._calls.evaluation = []
        elif not self.has_begun:
            self._buffers.take()
            self.has_begun = True
        try:
            yield
        except BaseException as error:
            self._micro_batches.note("evaluation" if is_evaluation else "forward", error)
            raise
        if is_evaluation:
            self._calls.end_evaluation()

    def end_step(self) -> None:
        """Retain the calls of an optimizer step as the expected calls of the next."""
        self._calls.end_step()
        self.has_begun = False

    def discard_step(self) -> None:
        """Restore the buffers from before the optimizer step, and discard its calls and its failure."""
        if self.has_begun:
            self._buffers.restore()
        self._calls.discard()
        self._micro_batches.failure, self.has_begun = None, False

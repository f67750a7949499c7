"""`Gradients`: the sharded parameters of a wrapped model, and the gradients that an optimizer step leaves on them."""

import torch
from torch import nn

from zeroamp.hooks.group_gradients import reset_gradients
from zeroamp.planning.mesh import local_part
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import StepError
from zeroamp.training.scalar_parameters import ReplicatedGradients
from zeroamp.wrapping.state import WrapState
from zeroamp.wrapping.step_state import Owner


class Gradients:
    """The sharded parameters of a wrapped model, with their gradients. Made while all groups are resharded."""

    def __init__(self, state: WrapState) -> None:
        self._state = state
        named = dict(state.root.named_parameters())
        self._fqns = list(named)
        self.parameters = list(named.values())
        """The sharded parameters. `model.parameters()` yields unsharded ones while a group is unsharded."""
        ignored = state.plan.ignored_fqns
        self.ignored = frozenset(parameter for fqn, parameter in named.items() if fqn in ignored)
        """The parameters of `wrap_model(ignored_params=...)`. `parameters` contains them too."""
        self._averaged = {fqn: p for fqn, p in named.items() if p not in self.ignored} if self.ignored else named
        self.averaged = self._averaged.values()
        """The parameters without the ignored ones."""
        replicated = [parameter for parameter in self.averaged if parameter.dim() == 0]
        self.replicated = ReplicatedGradients(replicated) if replicated else None
        """The 0-D parameters among them; None if there are none."""
        self._earlier: list[tuple[torch.Tensor, int]] = []  # parameter -> version of its gradient: see `note`

    def present(self) -> list[nn.Parameter]:
        """Return the parameters that have a gradient."""
        return [parameter for parameter in self.parameters if parameter.grad is not None]

    def note(self) -> None:
        """Note the gradients, reduced or not, that the next micro-batch adds to. Reads no values of them."""
        leaves = (leaf for group in self._state.gradients for leaf in group.leaves)
        self._earlier = [(p, p.grad._version) for p in (*self.parameters, *leaves) if p.grad is not None]

    def refuse_lost(self) -> None:
        """Raise StepError if a gradient that was noted is gone, or was set to zero. Call before each micro-batch.

        Nothing else changes, so that `TrainStep.zero_grad` may discard the optimizer step, and the loop may go on.
        """
        changed = []
        for parameter, version in self._earlier:
            if parameter.grad is None:
                raise _was_zeroed()
            if parameter.grad._version != version:
                changed.append(parameter.grad)
        # Only if something has written into the gradients, the host reads them.
        if changed and not any(bool(local_part(gradient).any()) for gradient in changed):
            raise _was_zeroed()
        self._earlier = []

    def release(self) -> None:
        """Release the gradients of all parameters, also of those that no optimizer holds."""
        for parameter in self.parameters:
            parameter.grad = None
        reset_gradients(self._state.gradients)
        for group in self._state.gradients:
            group.filled.clear()
        self._earlier = []

    def refuse_other(self, owner: Owner) -> None:
        """Raise StepError if there are gradients that the first backward of an optimizer step of `owner` would add to.

        Does not wait for the device: only whether `grad` is None is read.
        """
        current = self._state.step
        if current.is_open and current.owner is not owner:
            raise StepError(
                f"Another TrainStep of this model has run {current.num_micro_batches} micro-batch(es) of an "
                "optimizer step, and both use the same gradients. End that step first, or call zero_grad() of either "
                "to discard it."
            )
        accumulator = current.shard_accumulator
        # `torch.autograd.grad` of the model's inputs runs FSDP2's hooks, which reduce zeros for the parameters.
        zeros = [p for group in self._state.gradients if group.filled for p in group.only_zeros()]
        for parameter in zeros:
            parameter.grad = None
        if accumulator is not None:
            accumulator.discard(zeros)
        sums = accumulator.sums if accumulator is not None else None
        left = next((i for i, p in enumerate(self.parameters) if p.grad is not None or (sums and p in sums)), None)
        if left is not None:
            raise StepError(
                f"{self._fqns[left]} has a gradient before the first backward of an optimizer step. A backward of "
                "another model, or one without TrainStep, left it. Call train.zero_grad() first, which discards it."
            )

    def refuse_low_shards(self) -> None:
        """Raise StepError for a trainable parameter without fp32 shards: it was unfrozen or cast after `wrap_model`.

        Reads only dtypes and flags, without waiting for the device. FSDP2 would train it in the low dtype, or raise
        without the parameter's name.
        """
        for name, parameter in self._averaged.items():
            if parameter.dtype != torch.float32 and parameter.requires_grad:
                raise StepError(
                    f"{name} is trainable, but its shards are in {short_name(parameter.dtype)} instead of fp32: it was "
                    "unfrozen or cast after wrap_model. Unfreeze it before wrap_model, and do not cast a wrapped model."
                )


def _was_zeroed() -> StepError:
    return StepError(
        "zero_grad() was called between two micro-batches of an optimizer step, so the gradients of the earlier ones "
        "are lost. TrainStep discards gradients itself, after the update: remove the call of optimizer.zero_grad() or "
        "model.zero_grad(). To discard an optimizer step, call train.zero_grad()."
    )

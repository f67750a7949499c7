"""Continues optimizer steps in ways that only loops of other libraries need: after their last backward, or in parts."""

import torch

from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import StepError
from zeroamp.training.step_driver import StepDriver
from zeroamp.wrapping.step_state import Phase


def reopen(driver: StepDriver) -> None:
    """Continue an optimizer step whose last micro-batch has run: the next backward adds to its gradients.

    For loops that learn only after a backward whether it was the last one. Such a loop passes `is_last=True` to every
    backward, so every backward reduces its gradients. Nothing happens if the last micro-batch has not run.

    Raises:
        StepError: `clip` was called, `data_types.grad_accum_dtype` is not fp32, the config counts the micro-batches, an
            earlier backward or step raised, or with `zeroamp.reproducible` the order of additions depends on the number
            of micro-batches (stages 0 and 1, replicas).
    """
    driver.micro_batches.refuse_after_failure("A backward")
    if not driver.is_reduced:
        return
    if driver.phase is Phase.CLIPPED:
        raise StepError("A backward was called between clip_grad_norm() and update(). Call update() first.")
    if not driver.step_state.is_ended_by_caller:
        raise StepError(
            "An optimizer step was continued after its last backward, but the config counts micro-batches. Pass "
            "is_last to backward."
        )
    driver.micro_batches.arithmetic.refuse_reopen()
    dtype = driver.state.plan.policy.grad_accum_dtype
    if dtype != torch.float32:
        raise StepError(
            "A backward after the last one of an optimizer step needs sums of micro-batches in fp32, but "
            f"data_types.grad_accum_dtype is {short_name(dtype)}. Leave it out, or pass is_last=False to the backwards "
            "before the last one."
        )
    driver.step_state.phase = Phase.OPEN
    driver.micro_batches.note_gradients(are_reduced=True)


def update_part(driver: StepDriver, optimizer: torch.optim.Optimizer) -> None:
    """Step one of several optimizers after `clip`, and leave the optimizer step open.

    For loops that step their optimizers one by one, with code in between. `update(others)` ends the optimizer step: it
    steps the optimizers that are left, and discards all gradients. The scheduler of `optimizer` is not stepped.

    Raises:
        StepError: `clip` was not called before, or an earlier backward or step raised.
    """
    driver.refuse_update("update", [optimizer])
    with driver.callbacks.phase("optimizer"), driver.micro_batches.noting("optimizer.step"):
        driver.step_optimizers([optimizer])

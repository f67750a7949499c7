"""What `TrainStep` takes: the scheduler's interface, and optimizers and schedulers that it refuses."""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.policies.errors import StepError, describe


class Scheduler(Protocol):
    """What `TrainStep` needs of a learning-rate scheduler."""

    def step(self) -> Any:
        """Move to the next optimizer step's learning rate."""


@runtime_checkable
class StatefulScheduler(Scheduler, Protocol):
    """What a checkpoint needs of it."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them."""


def refuse_metric(scheduler: Scheduler | None) -> None:
    """Raise StepError for a scheduler whose step needs an argument."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise StepError(
            describe(
                "TrainStep(scheduler=)",
                "ReduceLROnPlateau, whose step needs a metric",
                "a scheduler whose step() takes nothing",
                "Leave it out here and call its step(metric) after each evaluation.",
            )
        )


def refuse_foreign(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Raise StepError if the optimizer holds others than `parameters`, the wrapped model's sharded ones."""
    known = {id(parameter) for parameter in parameters}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                kind = "sharded" if isinstance(parameter, DTensor) else "unsharded"
                raise StepError(
                    describe(
                        f"optimizer.param_groups[{index}]",
                        f"a {kind} parameter of shape {tuple(parameter.shape)} that is not the wrapped model's",
                        "the parameters of the wrapped model, while sharded",
                        "Build the optimizer from model.parameters() after wrap_model and before the first forward.",
                    )
                )


def misuse(method: str, found: str, valid: str, remedy: str) -> StepError:
    """Return the error for a method of `TrainStep` that is called out of turn, or with what it cannot take."""
    return StepError(describe(f"TrainStep.{method}", found, valid, remedy))


def without_gradient() -> StepError:
    """Return the error for a window that left no gradient on any parameter."""
    return StepError(
        describe(
            "TrainStep.step",
            "no gradient on any parameter",
            "a loss that depends on trainable parameters of the wrapped model",
            "Check that the loss comes from this model's forward, and that it is not frozen as a whole.",
        )
    )


def refuse_unfinished_window(method: str, num_micro_batches: int) -> None:
    """Raise StepError if the window, of which so many micro-batches were run, is not at its end."""
    if num_micro_batches > 0:
        raise StepError(
            describe(
                f"TrainStep.{method}",
                f"{num_micro_batches} micro-batches of an unfinished window",
                "the end of a window, after step() returned a report",
                "Call it there.",
            )
        )

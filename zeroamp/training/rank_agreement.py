"""Compares the ranks when a `TrainStep` is built, and in every optimizer step.

[Note: One number per step]
Each rank hashes what it did since the last optimizer step to one integer below 2^53 / N, for N ranks. The step's
all-reduce sums these integers in fp64, exactly. If the sum is not N times a rank's own number, the ranks differ, and
this rank raises. A rank does not detect the difference if its number happens to be the mean of all numbers. Numbers are
53 bits of a cryptographic hash, so this happens in one of 2^50 steps in which ranks differ. The other ranks then wait
for this rank until the timeout.
"""

from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import nn

from zeroamp.hooks.collectives.collective_calls import CallOrder
from zeroamp.policies.errors import StepError
from zeroamp.training.callbacks import Receive
from zeroamp.training.refused_arguments import Scheduler, StatefulScheduler
from zeroamp.wrapping.optimizer_hooks import hyperparameters_of
from zeroamp.wrapping.run_alike import PLAIN, Description, Hyperparameters, describe_hyperparameters, differences
from zeroamp.wrapping.state import WrapState


def description_of(
    root: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Scheduler | None],
    on_shards: Sequence[bool],
) -> Description:
    """Return the arguments of a `TrainStep` as text: classes, param groups, FQNs, hyperparameters, scheduler state.

    Waits for the device if hyperparameters are tensors.
    """
    fqns = {id(parameter): fqn for fqn, parameter in root.named_parameters()}
    found: dict[str, str] = {"the number of optimizers": str(len(optimizers))}
    for number, (optimizer, scheduler) in enumerate(zip(optimizers, schedulers, strict=True)):
        name = f"optimizer {number}"
        found[f"the class of {name}"] = _class(optimizer)
        found[f"on_shards of {name}"] = str(on_shards[number])
        found[f"the number of param groups of {name}"] = str(len(optimizer.param_groups))
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    found[f"{key} of {name}, param group {index}"] = _text(value)
            for position, parameter in enumerate(group["params"]):
                fqn = fqns.get(id(parameter), "a parameter of another model")
                held = ", ".join(optimizer.state[parameter]) if parameter in optimizer.state else "none"
                found[f"the place of {fqn} in {name}"] = f"param group {index}, number {position}, with state: {held}"
        found[f"the scheduler of {name}"] = _class(scheduler)
        if isinstance(scheduler, StatefulScheduler):
            for key, value in scheduler.state_dict().items():
                found[f"{key} of the scheduler of {name}"] = _text(value)
    return found


def _class(value: object) -> str:
    return "None" if value is None else f"{type(value).__module__}.{type(value).__qualname__}"


def _text(value: Any) -> str:
    """Return a text that is the same in every process for equal values: of an unknown object, its class."""
    if isinstance(value, torch.Tensor):
        return f"tensor({value.tolist()})" if value.numel() <= 16 else f"a tensor of {value.numel()} elements"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(held)}' for key, held in value.items())}}}"
    return repr(value) if isinstance(value, PLAIN) else _class(value)


class Done(NamedTuple):
    """Counts and settings of one optimizer step that must be equal on all ranks. Errors name the fields."""

    steps_taken_before: int
    steps_skipped_before: int
    losses_divided_by_gradient_accumulation_steps: int
    is_last_given_by_the_caller: bool | None
    max_norm: float
    loss_scale: float
    training_mode_of_the_model: bool


class _Facts(NamedTuple):
    """What one rank did in one optimizer step, as Python values that are read without waiting for the device.

    Equal facts have the same `repr` in every process.
    """

    done: Done | None
    num_backwards: int
    hyperparameters: Hyperparameters
    """Of each param group of each optimizer."""
    held: list[list[int]]
    """Of each param group: twice the position of each parameter in the model, plus 1 if it has optimizer state."""
    calls: bytes
    """A hash of the collectives of the parameter groups, in their order."""


class RankAgreement:
    """Raises on all ranks if they did different things in an optimizer step: see [Note: One number per step].

    On a CPU the ranks raise in the same step. On other devices they raise in the next one: reading the sum at once
    would make the host wait for the device.
    """

    def __init__(self, state: WrapState, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        state.issued.is_counted = True
        self.done: Done | None = None
        """Set by `TrainStep` before the step's all-reduce."""
        self.issued = state.issued
        """The collectives of this rank in the current optimizer step. All `TrainStep`s of a model share it."""
        self._state = state
        self._optimizers = optimizers
        self._parameters = list(state.root.parameters())
        self._places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        self._num_ranks = state.axes.whole.size()

    def number(self, *, is_late: bool) -> tuple[Sequence[float], Receive]:
        """Return this rank's number for the current optimizer step, and the function that checks the sum over ranks.

        Begins the next optimizer step. If the ranks differ, the function raises StepError on all ranks. `is_late`:
        whether the function is called in the next step.
        """
        groups = [(optimizer.state, group) for optimizer in self._optimizers for group in optimizer.param_groups]
        facts = _Facts(
            done=self.done,
            num_backwards=self.issued.num_backwards,
            hyperparameters=hyperparameters_of(group for _, group in groups),
            held=[
                [2 * self._places.get(id(p), -1) + bool(state.get(p)) for p in group["params"]]
                for state, group in groups
            ],
            calls=self.issued.calls.digest(),
        )
        calls = self.issued.calls
        self.issued.end_step()
        digest = blake2b(repr(facts).encode(), digest_size=8).digest()
        number = int.from_bytes(digest) % (2**53 // self._num_ranks)
        return (float(number),), partial(self._compare, facts, calls, self._num_ranks * number, is_late)

    def _compare(self, facts: _Facts, calls: CallOrder, expected: int, is_late: bool, sums: Sequence[float]) -> None:
        if sums[0] == expected:
            return
        what, remedy = "This optimizer step", "Nothing was updated in it."
        if is_late:
            what, remedy = "The optimizer step before this one", "Restart from a checkpoint before that step."
        found = differences({**self._describe(facts), **calls.describe()}, self._state.world)
        raise StepError(
            f"{what} {found} Run the same code with the same settings on all ranks. If only some ranks run a module, "
            f'name the module in "zeroamp": {{"optional_units": [...]}}. {remedy}'
        )

    def _describe(self, facts: _Facts) -> Description:
        found = {"the number of backwards": str(facts.num_backwards)}
        done = {} if facts.done is None else dict(zip(Done.__annotations__, facts.done, strict=True))
        found |= {name.replace("_", " ").replace("max norm", "max_norm"): str(value) for name, value in done.items()}
        found |= describe_hyperparameters(facts.hyperparameters)
        names = {id(parameter): fqn for fqn, parameter in self._state.root.named_parameters()}
        fqns = [names.get(id(parameter), "a removed parameter") for parameter in self._parameters]
        fqns.append("a parameter of another model")
        for index, held in enumerate(facts.held):
            for number, (place, has_state) in enumerate(divmod(each, 2) for each in held):
                state = "with state" if has_state else "without state"
                found[f"the place of {fqns[place]}"] = f"param group {index}, number {number}, {state}"
        return found

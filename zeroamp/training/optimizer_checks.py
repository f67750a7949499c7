"""Checks the optimizers that `TrainStep` is given, and shards the state that they load.

Only torch's element-wise optimizers are known here. `zeroamp.optimizers.kinds` is imported for any other class.

docs/optimizers.md has a table of optimizers.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from zeroamp.policies.errors import StepError
from zeroamp.wrapping.optimizer_hooks import ELEMENTWISE


def checked_on_shards(on_shards: bool | Sequence[bool], num_optimizers: int) -> tuple[bool, ...]:
    """Return one value per optimizer.

    Raises:
        StepError: `on_shards` is neither a bool nor one bool per optimizer.
    """
    values = (on_shards,) * num_optimizers if isinstance(on_shards, bool) else on_shards
    if not isinstance(values, Sequence) or [type(value) for value in values] != [bool] * num_optimizers:
        raise StepError(
            f"TrainStep(on_shards=) must be True, False, or a list of one bool for each of the {num_optimizers} "
            f"optimizers, but is {on_shards!r}."
        )
    return tuple(values)


def refuse_unsupported(optimizer: torch.optim.Optimizer, *, on_shards: bool) -> None:
    """Raise StepError for an optimizer that would fail on sharded parameters, or update them wrongly."""
    if type(optimizer) not in ELEMENTWISE:
        from zeroamp.optimizers.kinds import refuse_other

        refuse_other(optimizer, on_shards=on_shards)


def shard_loaded_state(optimizer: torch.optim.Optimizer, root: nn.Module) -> None:
    """Shard the whole tensors of an optimizer's state, now and at each later `load_state_dict`.

    They come from a run without zeroamp. Call it while the parameters of `root`, the wrapped model, are sharded.

    Raises:
        StepError: a tensor does not fit its parameter.
    """
    names = {id(parameter): fqn for fqn, parameter in root.named_parameters()}

    def before_load(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> Any:
        from zeroamp.optimizers.loaded_state import shard_state_dict

        return shard_state_dict(optimizer, state_dict, names)

    if optimizer.state:
        from zeroamp.optimizers.loaded_state import shard_state

        shard_state(optimizer, names)
    with suppress(AttributeError):  # a wrapper that does not call `Optimizer.__init__` has no hooks
        optimizer.register_load_state_dict_pre_hook(before_load)

"""Optimizer state that comes from a run without zeroamp: its whole tensors are sharded when they are loaded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zeroamp.optimizers.bf16_states import Bf16StatesAdamW
from zeroamp.planning.mesh import local_slices, sharded_like
from zeroamp.policies.errors import StepError
from zeroamp.wrapping.optimizer_hooks import ELEMENTWISE


def shard_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Shard the whole tensors of an optimizer's state. `names`: id of a sharded parameter -> FQN.

    Raises:
        StepError: a tensor does not fit its parameter.
    """
    for parameter, values in optimizer.state.items():
        optimizer.state[parameter] = _sharded_state(optimizer, parameter, values, names)


def shard_state_dict(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], names: Mapping[int, str]
) -> dict[str, Any]:
    """Return an optimizer's state dict with its whole tensors sharded. Raises StepError as `shard_state` does."""
    saved = (index for group in state_dict["param_groups"] for index in group["params"])
    own = (parameter for group in optimizer.param_groups for parameter in group["params"])
    state = dict(state_dict["state"])
    for index, parameter in zip(saved, own, strict=False):  # torch refuses other numbers of parameters
        if index in state:
            state[index] = _sharded_state(optimizer, parameter, state[index], names)
    return {**state_dict, "state": state}


@torch.no_grad()
def _sharded_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, values: dict[str, Any], names: Mapping[int, str]
) -> dict[str, Any]:
    """Return the state of one parameter, with whole tensors sharded like the parameter. Communicates nothing.

    Only torch's element-wise optimizers are known to have state of the parameter's shape. That of others is returned as
    it is: it may be plain tensors of their shard, such as 8-bit values in blocks.
    """
    if not isinstance(parameter, DTensor) or type(optimizer) not in (*ELEMENTWISE, Bf16StatesAdamW):
        return values
    result = dict(values)
    for key, value in values.items():
        if isinstance(value, DTensor) or not isinstance(value, torch.Tensor) or value.dim() == 0:
            continue
        if value.shape != parameter.shape:
            raise StepError(
                f'{type(optimizer).__name__} was given the state "{key}" of {names.get(id(parameter), "a parameter")} '
                f"as a plain tensor of shape {tuple(value.shape)}, but the parameter has the shape "
                f"{tuple(parameter.shape)}. Load whole tensors in the order of model.parameters(), or a checkpoint by "
                "zeroamp.load_checkpoint."
            )
        # Not a view, which would retain the whole.
        result[key] = sharded_like(value[local_slices(parameter)].to(parameter.device, copy=True), parameter)
    return result

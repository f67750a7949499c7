"""Reads whole parameters, gradients and optimizer state of a wrapped model, and sets parameters.

All functions are collective: every rank calls them, for the same parameters in the same order. A parameter may be given
as `model.named_parameters()` yields it at any time: sharded, or unsharded in the middle of an optimizer step. Copies
are on the mesh's device, in the dtype of the shards. Of a value that is set, the first rank's is used: it has the whole
shape, may be on any device, and is cast.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.fsdp import parameter_pairs
from zeroamp.host_memory.storages import bring_state_back
from zeroamp.planning.mesh import axis_groups, device_of, local_part
from zeroamp.policies.errors import StepError, describe, some_of
from zeroamp.tensor_shards import is_bound_to_shard, local_slices
from zeroamp.wrapping.state import WrapState, reshard, wrap_state, wrapped_models
from zeroamp.wrapping.step_state import Phase


def _owner_of(parameter: nn.Parameter) -> tuple[WrapState, nn.Parameter]:
    """Return the state of the wrapped model that has a sharded or unsharded parameter, and the sharded parameter.

    Raises:
        StepError: no wrapped model has the parameter.
    """
    for root in wrapped_models():
        for pair in parameter_pairs(root):
            if any(parameter is each for each in pair):
                return wrap_state(root), pair[0]
        if any(parameter is each for each in root.parameters()):  # not sharded: 0-D, or without elements
            return wrap_state(root), parameter
    raise StepError(
        f"A parameter of shape {tuple(parameter.shape)} is not one of a wrapped model. Pass one that "
        "model.named_parameters() yields after wrap_model."
    )


def full_parameter(parameter: nn.Parameter) -> torch.Tensor:
    """Return a copy of the whole parameter, without requiring a gradient: in fp32 if it is trainable."""
    state, sharded = _owner_of(parameter)
    return _whole(sharded, state)


def set_full_parameter(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole parameter. Call it between two optimizer steps; between their micro-batches it is a StepError."""
    state, sharded = _owner_of(parameter)
    _refuse_open_step(state, "set_full_parameter")
    _fill(sharded, value, state)
    reshard(state.root.modules())  # unsharded copies hold the old value


def full_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of the whole gradient: averaged over ranks, summed over micro-batches, without the loss scale.

    With `zeroamp.reduce` "sum" it is summed over ranks. Call this after the last backward of an optimizer step and
    before its update; of a 0-D parameter, after `clip_grad_norm`. Before `clip_grad_norm` the gradient is not clipped.
    None: there is no gradient.

    Raises:
        StepError: the parameter is not one of a wrapped model, or the last micro-batch has not run.
    """
    state, sharded = _owner_of(parameter)
    gradient = _gradient(sharded, state, "full_gradient")
    return None if gradient is None else _whole(gradient, state).div_(state.step.gradient_scale)


def full_optimizer_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str) -> torch.Tensor:
    """Return a copy of one whole tensor of a parameter's optimizer state: "exp_avg", "momentum_buffer" or "step", say.

    Raises:
        StepError: the parameter is not one of a wrapped model, or the optimizer has no such whole tensor: before its
            first step it has none, and 8-bit values in blocks belong to the shard of each rank.
    """
    state, sharded = _owner_of(parameter)
    bring_state_back(optimizer)
    return _whole(_entry(optimizer.state.get(sharded, {}), sharded, key), state)


def _refuse_open_step(state: WrapState, method: str) -> None:
    if state.step.phase is Phase.OPEN:
        raise StepError(
            f"{method} was called before the last micro-batch of an optimizer step. Gradients are complete after its "
            "backward, and parameters can be set between two optimizer steps."
        )


def _gradient(sharded: nn.Parameter, state: WrapState, method: str) -> torch.Tensor | None:
    """Return the sharded gradient, multiplied by the loss scale."""
    _refuse_open_step(state, method)
    if state.step.shard_accumulator is not None:
        state.step.shard_accumulator.flush()
    return sharded.grad


def _entry(entries: dict[str, Any], sharded: nn.Parameter, key: str) -> torch.Tensor:
    value = entries.get(key)
    if not isinstance(value, torch.Tensor) or is_bound_to_shard(sharded, entries):
        found = some_of([name for name, each in entries.items() if isinstance(each, torch.Tensor)]) or "none"
        raise StepError(
            f'The optimizer has no whole tensor "{key}" for a parameter of shape {tuple(sharded.shape)}: its tensors '
            f"are {found}. State is created in the first step, for parameters with a gradient. Of state in 8 bits, "
            "each rank has its own part: read optimizer.state."
        )
    return value


@torch.no_grad()
def _whole(tensor: torch.Tensor, state: WrapState) -> torch.Tensor:
    """Return a copy of the whole tensor, on the device of the mesh."""
    on_device = tensor.detach().to(device_of(state.mesh))  # an offloaded shard is on the CPU
    return (on_device.full_tensor() if isinstance(on_device, DTensor) else on_device).clone()


@torch.no_grad()
def _fill(tensor: torch.Tensor, value: torch.Tensor, state: WrapState) -> None:
    """Copy the first rank's `value` into `tensor`, of which each rank holds a shard."""
    if value.shape != tensor.shape:
        found, valid = f"of shape {tuple(value.shape)}", f"of the whole shape, {tuple(tensor.shape)}"
        raise StepError(describe("The value to set", found, valid, "Pass the whole tensor, on every rank."))
    whole = value.detach().to(device_of(state.mesh), tensor.dtype).contiguous()
    for group in axis_groups(state.axes.whole):
        dist.broadcast(whole, group=group, group_src=0)
    local_part(tensor).copy_(whole[local_slices(tensor)] if isinstance(tensor, DTensor) else whole)

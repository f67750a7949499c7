"""Reads and sets whole parameters, gradients and optimizer state of a wrapped model.

All functions are collective: every rank calls them, for the same parameters in the same order. A parameter may be given
as `model.named_parameters()` yields it at any time: sharded, or unsharded in the middle of an optimizer step.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.fsdp import parameter_pairs
from zeroamp.planning.mesh import axis_groups, device_of, local_part
from zeroamp.policies.errors import StepError, describe, some_of
from zeroamp.tensor_shards import is_bound_to_shard, local_slices
from zeroamp.wrapping.state import WrapState, reshard, wrap_state, wrapped_models
from zeroamp.wrapping.step_state import Phase


def owner_of(parameter: nn.Parameter) -> tuple[WrapState, nn.Parameter]:
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
    """Return a copy of the whole parameter, in the dtype of its shards (fp32 if it is trainable).

    The copy is on the mesh's device, and does not require a gradient.

    Raises:
        StepError: the parameter is not one of a wrapped model.
    """
    state, sharded = owner_of(parameter)
    return _whole(sharded, state)


def set_full_parameter(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole parameter. Call it between two optimizer steps.

    Args:
        parameter: of a wrapped model.
        value: of the parameter's shape, on any device, cast to the parameter's dtype. The first rank's value is used.

    Raises:
        StepError: the parameter is not one of a wrapped model, the shape differs, or this is called between the
            micro-batches of an optimizer step.
    """
    state, sharded = owner_of(parameter)
    if state.step.phase is Phase.OPEN:
        raise StepError(
            "set_full_parameter was called between the micro-batches of an optimizer step, so their forwards would use "
            "different values. Call it between two optimizer steps."
        )
    _fill(sharded, value, state, "set_full_parameter")
    reshard(state.root.modules())  # unsharded copies hold the old value


def full_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of the whole gradient: averaged over ranks, summed over micro-batches, without the loss scale.

    With `zeroamp.reduce` "sum" it is summed over ranks. Call this after the last backward of an optimizer step and
    before its update. Before `clip_grad_norm` the gradient is not clipped. It has the dtype of the sharded parameter
    and is on the mesh's device. None: there is no gradient.

    Raises:
        StepError: the parameter is not one of a wrapped model, the last micro-batch has not run, or a 0-D parameter is
            given before `clip_grad_norm`.
    """
    state, sharded = owner_of(parameter)
    gradient, scale = _gradient(sharded, state, "full_gradient")
    if gradient is None:
        return None
    whole = _whole(gradient, state)
    return whole if scale == 1.0 else whole.div_(scale)


def set_full_gradient(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the whole gradient of a parameter that has one.

    Call this after the last backward of an optimizer step and before its update, like `full_gradient`.

    Args:
        parameter: of a wrapped model.
        value: what `full_gradient` then returns, of the parameter's shape, on any device. The first rank's value is
            used.

    Raises:
        StepError: as `full_gradient`; or the shape differs, or the parameter has no gradient.
    """
    state, sharded = owner_of(parameter)
    gradient, scale = _gradient(sharded, state, "set_full_gradient")
    if gradient is None:
        raise StepError(
            f"set_full_gradient was given a parameter of shape {tuple(sharded.shape)} without a gradient. Call it "
            "after the last backward of an optimizer step, for a parameter that the loss depends on."
        )
    for group in state.gradients:
        group.use(sharded)  # else the step discards the gradient if no rank used the parameter
    _fill(gradient, value if scale == 1.0 else value.to(gradient.dtype) * scale, state, "set_full_gradient")


def full_optimizer_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str) -> torch.Tensor:
    """Return a copy of one whole tensor of a parameter's optimizer state: "exp_avg", "momentum_buffer" or "step", say.

    The copy has the dtype of the state, and is on the mesh's device.

    Raises:
        StepError: the parameter is not one of a wrapped model, the optimizer has no such tensor (as before its first
            step), or the state belongs to the shard of each rank (8-bit values in blocks, for example).
    """
    state, sharded = owner_of(parameter)
    return _whole(_entry(optimizer, sharded, key, "full_optimizer_state"), state)


def set_full_optimizer_state(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str, value: torch.Tensor
) -> None:
    """Set one tensor of a parameter's optimizer state. Call this between two optimizer steps.

    Args:
        optimizer: one that already has state of the parameter.
        parameter: of a wrapped model.
        key: the optimizer's name of the tensor.
        value: of the shape that `full_optimizer_state` returns, on any device. The first rank's value is used.

    Raises:
        StepError: as `full_optimizer_state`; or the shape differs.
    """
    state, sharded = owner_of(parameter)
    _fill(_entry(optimizer, sharded, key, "set_full_optimizer_state"), value, state, "set_full_optimizer_state")


def _gradient(sharded: nn.Parameter, state: WrapState, method: str) -> tuple[torch.Tensor | None, float]:
    """Return the sharded gradient, and the factor that it is multiplied by (the loss scale, or 1)."""
    if state.step.phase is Phase.OPEN:
        raise StepError(
            f"{method} was called before the last micro-batch of an optimizer step, when gradients are not complete. "
            "Call it after the last backward and before the update."
        )
    if sharded.dim() == 0 and state.step.phase is not Phase.CLIPPED:
        raise StepError(
            f"{method} was given a 0-D parameter before clip_grad_norm(), which averages its gradient over ranks. Call "
            "it between clip_grad_norm() and update()."
        )
    if state.step.shard_accumulator is not None:
        state.step.shard_accumulator.flush()
    return sharded.grad, state.step.gradient_scale


def _entry(optimizer: torch.optim.Optimizer, sharded: nn.Parameter, key: str, method: str) -> torch.Tensor:
    entries = optimizer.state.get(sharded, {})
    value = entries.get(key)
    if not isinstance(value, torch.Tensor):
        tensors = [name for name, held in entries.items() if isinstance(held, torch.Tensor)]
        raise StepError(
            f'{method} found no tensor "{key}" in the state of {type(optimizer).__name__} for a parameter of shape '
            f"{tuple(sharded.shape)}, which has {some_of(tensors) or 'none'}. An optimizer creates its state in "
            "its first step, for parameters with a gradient."
        )
    if is_bound_to_shard(sharded, entries):
        raise StepError(
            f'{method} was given "{key}" of {type(optimizer).__name__}, whose state belongs to the shard of each rank '
            "(8-bit values in blocks, for example): there is no whole tensor. Read optimizer.state of this rank."
        )
    return value


@torch.no_grad()
def _whole(tensor: torch.Tensor, state: WrapState) -> torch.Tensor:
    """Return a copy of the whole tensor, on the device of the mesh."""
    on_device = tensor.detach().to(device_of(state.mesh))  # an offloaded shard is on the CPU
    whole = on_device.full_tensor() if isinstance(on_device, DTensor) else on_device
    is_shared = whole.untyped_storage().data_ptr() == local_part(tensor).untyped_storage().data_ptr()
    return whole.clone() if is_shared else whole


@torch.no_grad()
def _fill(tensor: torch.Tensor, value: torch.Tensor, state: WrapState, method: str) -> None:
    """Copy the first rank's `value` into `tensor`, of which each rank holds a shard."""
    if value.shape != tensor.shape:
        found, valid = f"of shape {tuple(value.shape)}", f"of the whole shape, {tuple(tensor.shape)}"
        raise StepError(describe(f"{method}(value=)", found, valid, "Pass the whole tensor, on every rank."))
    whole = value.detach().to(device_of(state.mesh), tensor.dtype).contiguous()
    for group in axis_groups(state.axes.whole):
        dist.broadcast(whole, group=group, group_src=0)
    local_part(tensor).copy_(whole[local_slices(tensor)] if isinstance(tensor, DTensor) else whole)

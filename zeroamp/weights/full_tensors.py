"""Reads whole parameters and gradients of a wrapped model, and sets parameters.

All functions are collective: every rank calls them, for the same parameters in the same order. A parameter may be given
as `model.named_parameters()` yields it at any time: sharded, or unsharded in the middle of an optimizer step. Copies
are on the mesh's device, in the dtype of the shards. Of a value that is set, the first rank's is used: it has the whole
shape, may be on any device, and is cast.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.fsdp import parameter_pairs
from zeroamp.planning.mesh import axis_groups, device_of, local_part, local_slices
from zeroamp.policies.errors import StepError, describe
from zeroamp.weights.buckets import naming_lost_ranks
from zeroamp.wrapping.state import WrapState, reshard, wrap_state, wrapped_models
from zeroamp.wrapping.step_state import StepPhase


def _owner_of(parameter: nn.Parameter) -> tuple[WrapState, nn.Parameter]:
    """Return the state of the wrapped model that has a sharded or unsharded parameter, and the sharded parameter."""
    for root in wrapped_models(with_hidden=True):  # `wrap_state` says why a model is hidden
        not_sharded = ((each, None) for each in root.parameters())  # 0-D, or without elements
        for sharded, unsharded in (*parameter_pairs(root), *not_sharded):
            if parameter is sharded or parameter is unsharded:
                return wrap_state(root), sharded
    raise StepError(
        f"A parameter of shape {tuple(parameter.shape)} is not one of a wrapped model. Pass one that "
        "model.named_parameters() yields after wrap_model."
    )


def full_parameter(parameter: nn.Parameter) -> torch.Tensor:
    """Return a copy of the whole parameter, without requiring a gradient: in fp32 if it is trainable."""
    state, sharded = _owner_of(parameter)
    return _whole(sharded, state, "full_parameter")


@torch.no_grad()
def set_full_parameter(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole parameter. Call it between two optimizer steps; between their micro-batches it is a StepError."""
    state, sharded = _owner_of(parameter)
    _refuse_open_step(state, "set_full_parameter")
    if value.shape != sharded.shape:
        found, valid = f"of shape {tuple(value.shape)}", f"of the whole shape, {tuple(sharded.shape)}"
        raise StepError(describe("The value to set", found, valid, "Pass the whole tensor, on every rank."))
    whole = value.detach().to(device_of(state.mesh), sharded.dtype).contiguous()
    with naming_lost_ranks("set_full_parameter"):
        for group in axis_groups(state.axes.whole):
            dist.broadcast(whole, group=group, group_src=0)
    local_part(sharded).copy_(whole[local_slices(sharded)] if isinstance(sharded, DTensor) else whole)
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
    _refuse_open_step(state, "full_gradient")
    if state.step.shard_accumulator is not None:
        state.step.shard_accumulator.flush()
    return (
        None if sharded.grad is None else _whole(sharded.grad, state, "full_gradient").div_(state.step.gradient_scale)
    )


def _refuse_open_step(state: WrapState, method: str) -> None:
    if state.step.phase is StepPhase.OPEN:
        raise StepError(
            f"{method} was called before the last micro-batch of an optimizer step. Gradients are complete after its "
            "backward, and parameters can be set between two optimizer steps."
        )


@torch.no_grad()
def _whole(tensor: torch.Tensor, state: WrapState, call: str) -> torch.Tensor:
    """Return a copy of the whole tensor, on the device of the mesh."""
    on_device = tensor.detach().to(device_of(state.mesh))  # an offloaded shard is on the CPU
    with naming_lost_ranks(call):
        return (on_device.full_tensor() if isinstance(on_device, DTensor) else on_device).clone()

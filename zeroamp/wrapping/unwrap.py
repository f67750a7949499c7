"""`unwrap_model`: undoes `wrap_model`, so that a trained model can go on as a plain `nn.Module`."""

from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.dispatch import is_in_backward
from zeroamp.hooks._torch.fsdp import remove_late_hooks
from zeroamp.hooks.collectives.collective_calls import peer_lost
from zeroamp.planning.mesh import device_of, local_part
from zeroamp.policies.errors import StepError, WrapError
from zeroamp.wrapping.optimizer_hooks import parameters_before, watch_optimizers
from zeroamp.wrapping.run_alike import Description, run_alike
from zeroamp.wrapping.state import WrapState, forget_state, refuse_joined, reshard, wrap_state

M = TypeVar("M", bound=nn.Module)


def unwrap_model(model: M) -> M:
    """Undo `wrap_model` in place. Return the same object, which no longer depends on zeroamp, FSDP2 or other ranks.

    All ranks call this, between two optimizer steps. The modules get their classes, methods and children back, and the
    hooks of zeroamp and FSDP2 are gone. Hooks and attributes that you added stay. Each sharded parameter becomes a
    plain `nn.Parameter` with the whole value, on every rank, on the device and in the dtype of its shards. So a
    trainable parameter that was in bf16 or fp16 before `wrap_model` is in fp32; `model.to(torch.bfloat16)` rounds it.
    Tied parameters stay tied, and frozen ones frozen. Buffers stay as they are, also those that were cast to
    `data_types.buffer_dtype`. Gradients are discarded: `grad` is None. Each rank needs memory for the shards and for
    the whole model at once.

    The model can be copied, pickled, and wrapped again. Optimizers and `TrainStep`s that were built for the wrapped
    model hold its old parameters: they raise a StepError, and so does the backward of an earlier forward.

    Raises:
        WrapError: the model is not wrapped, is asleep, is being read, or was loaded in part; its mesh has a tensor or
            expert axis; parameters are quantized, or on the meta device; an attribute that `wrap_model` set, such as a
            module's `forward`, was set again; or the ranks called this for different models.
        StepError: called inside a forward, a backward or an optimizer step.
        PeerError: another rank ended, or did not call `unwrap_model`. The model is still wrapped.

    Examples:
        >>> policy = zeroamp.policy_from_config({"zero_optimization": {"stage": 3}})
        >>> model = zeroamp.wrap_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), policy)
        >>> model = zeroamp.unwrap_model(model)
        >>> type(model[0]).__name__, type(model[0].weight.data).__name__
        ('Linear', 'Tensor')
    """
    state = wrap_state(model)
    refuse_joined(state, "unwrap_model")
    run_alike(
        partial(_checked, state),
        what="unwrap_model",
        remedy="Call unwrap_model on all ranks, for the same model.",
        error_type=WrapError,
        group=state.world,
        device=device_of(state.mesh),
    )
    root, before = state.root, parameters_before(state.root)
    sharded = [parameter for group in state.gradients for parameter in group.parameters]
    try:  # all of them before the first change: after an error the model is still wrapped
        whole = {parameter: nn.Parameter(_whole(parameter, state), parameter.requires_grad) for parameter in sharded}
    except RuntimeError as error:
        raise peer_lost(error, None, state.listeners) from error
    for module in root.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            parameter.grad = None
            if parameter in whole:
                setattr(module, name, whole[parameter])
    remove_late_hooks(root)
    state.changes.undo()
    forget_state(root)
    state.step.is_unwrapped = True
    for group in state.gradients:  # a backward would put unsharded parameters into the modules
        for method in ("unshard", "post_backward"):
            group.group.replace(method, _refuse_backward)
    watch_optimizers(root, before, "unwrap_model")
    return model


@torch.no_grad()
def _whole(parameter: nn.Parameter, state: WrapState) -> torch.Tensor:
    """Return a copy of the whole parameter, on the device of its shard."""
    shard: Any = parameter.detach().to(device_of(state.mesh))  # an offloaded shard is on the CPU
    whole: torch.Tensor = shard.full_tensor().clone()
    return whole.to(parameter.device)


def _refuse_backward(*_args: object, **_kwargs: object) -> None:
    raise StepError(
        "A backward of a forward before unwrap_model was called, which gave the model other parameters. Run the "
        "backward before unwrap_model, or the forward again."
    )


def _checked(state: WrapState) -> tuple[None, Description]:
    """Raise if this rank cannot unwrap the model, else reshard it. Return the names and shapes of its parameters."""
    root, where = state.root, "unwrap_model was called"
    if state.root_forward.depth or is_in_backward():
        raise StepError(
            f"{where} inside a forward or a backward of the model. Call it after them. If a forward was interrupted "
            "(Ctrl-C), run another one first."
        )
    state.step.refuse_unfinished("unwrap_model")
    if not state.axes.is_plain:
        raise WrapError(
            f"{where}, but the mesh ({state.axes.describe()}) has a tensor or expert axis, over which parameters were "
            "distributed before wrap_model. Write the whole weights by export_hf, or read them by full_parameter."
        )
    if {"_zeroamp_save", "_zeroamp_sleep"} & vars(root).keys():
        raise WrapError(
            f"{where} while a save in the background was not waited for, or an optimizer of the model is asleep. Call "
            "zeroamp.wait_for_save(model) and zeroamp.wake(model) first."
        )
    reshard(root.modules())
    for fqn, parameter in root.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        owner, shard = root.get_submodule(fqn.rpartition(".")[0]), local_part(parameter.detach())
        if getattr(owner, "quant_state", None) is not None or type(shard) is not torch.Tensor:
            raise WrapError(
                f"{where}, but {fqn} is quantized, and FSDP2 has replaced its class of parameter. Load the quantized "
                "model again, and copy the trained parameters by full_parameter."
            )
        if parameter.is_meta:
            raise WrapError(f"{where}, but {fqn} is on the meta device. Give it values first, as by zeroamp.load_hf.")
    if (replaced := state.changes.replaced_since()) is not None:
        module, name = replaced
        fqn = next((fqn for fqn, each in root.named_modules() if each is module), "")
        raise WrapError(
            f"{where}, but {name} of {fqn or 'the root'} was set after wrap_model, and may call what wrap_model had "
            "set. Set the value from before first."
        )
    return None, {
        "the model": type(root).__name__,
        **{f"the shape of {fqn}": str(tuple(each.shape)) for fqn, each in root.named_parameters()},
    }

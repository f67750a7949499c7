"""`unwrap_model`: makes a wrapped model plain again."""

from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.fsdp import remove_fsdp
from zeroamp.hooks.typed_groups import Holder
from zeroamp.planning.mesh import device_of
from zeroamp.policies.errors import StepError, WrapError
from zeroamp.wrapping.refused_meshes import refuse_model_axes
from zeroamp.wrapping.state import WrapState, record_state, reshard, wrap_state


@torch.no_grad()
def unwrap_model(model: nn.Module) -> nn.Module:
    """Undo `wrap_model` in place, and return the model: with full parameters, and without hooks of zeroamp or FSDP2.

    All ranks call this, between two optimizer steps. Each rank then has the whole model, in the dtype of the sharded
    parameters (fp32 for trainable ones), on the device of the mesh. Gradients are discarded. A `TrainStep` and
    optimizers that were built on the wrapped model still have its shards: do not use them any more. The model can be
    wrapped again.

    ```python
    model = zeroamp.unwrap_model(model)
    torch.save(model.state_dict(), "model.pt")
    ```

    Raises:
        WrapError: `model` is not wrapped or is tensor- or expert-parallel, or inference mode is on.
        StepError: an optimizer step has begun and not ended.
    """
    state = wrap_state(model)
    refuse_model_axes(state.axes, "unwrap_model", "zeroamp.export_hf writes whole weights.")
    if torch.is_inference_mode_enabled():
        raise WrapError(
            "unwrap_model was called inside torch.inference_mode(). Parameters that are made there cannot be trained. "
            "Call it outside of inference mode."
        )
    if state.is_in_step:
        raise StepError(
            "unwrap_model was called in the middle of an optimizer step, whose gradients would be lost. Call it after "
            "step() returned a report, or call TrainStep.zero_grad() first."
        )
    root = state.root
    reshard(root.modules())
    _remove_hooks(state)
    full: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
    modules = [module for module in root.modules() if not isinstance(module, Holder)]
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, DTensor) and parameter not in full:
                # The device computes and communicates; an offloaded shard is on the CPU.
                whole = cast(DTensor, parameter.to(device_of(state.mesh))).full_tensor()
                full[parameter] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            module._parameters[name] = full.get(parameter, parameter)
    remove_fsdp(root)
    for module in modules:
        for name, child in list(module.named_children()):
            if isinstance(child, Holder):
                delattr(module, name)
    record_state(root, None)
    state.is_unwrapped = True
    return root


def _remove_hooks(state: WrapState) -> None:
    for handle in state.handles:
        handle.remove()
    for region in state.fp32_regions:
        region.remove()
    if state.shard_accumulator is not None:
        state.shard_accumulator.forget()
    state.root_forward.restore_methods(state.root)

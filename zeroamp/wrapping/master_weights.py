"""fp32 master weights of trainable parameters that the model holds in bf16 or fp16."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.planning.groups import ParamPlan
from zeroamp.planning.mesh import device_of
from zeroamp.policies.dtypes import short_name, stored_dtype

MIB = 1024**2


def store(model: nn.Module, params: Iterable[ParamPlan], mesh: DeviceMesh) -> None:
    """Cast parameters to the dtype in which they are stored. Call before the `fully_shard` that shards them.

    Called group by group, so that one group at most is there in fp32 and unsharded. The cast is on the device of
    `mesh`, where FSDP2 would move the parameters next; parameters on the meta device stay there.
    """
    for param in params:
        parameter = model.get_parameter(param.fqn)
        if parameter.dtype != param.dtypes.stored:
            device = parameter.device if parameter.is_meta else device_of(mesh)
            parameter.grad = None  # of the old dtype; sharding discards gradients anyway
            parameter.data = parameter.data.to(device, param.dtypes.stored)


def describe_master_weights(model: nn.Module) -> str | None:
    """Return a line about the parameters that get master weights, before they do; None if there are none."""
    low = [parameter for parameter in model.parameters() if stored_dtype(parameter) != parameter.dtype]
    if not low:
        return None
    numel = sum(parameter.numel() for parameter in low)
    dtypes = " and ".join(sorted({short_name(parameter.dtype) for parameter in low}))
    return (
        f"{len(low)} trainable parameters stored in {dtypes} ({sum(p.nbytes for p in low) / MIB:,.1f} MiB) become fp32 "
        f"master weights ({numel * torch.float32.itemsize / MIB:,.1f} MiB over all shards)"
    )

"""`zeroamp.sync_module_states`: broadcasts the first rank's parameters and buffers before the model is sharded."""

from collections.abc import Container

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.planning.mesh import axis_groups, device_of, local_part
from zeroamp.planning.mesh_axes import MeshAxes
from zeroamp.planning.parameter_uses import quantization_tensors
from zeroamp.wrapping.checks import replicas_of


@torch.no_grad()
def broadcast_module_states(model: nn.Module, axes: MeshAxes, ignored: Container[str] = ()) -> None:
    """Set all parameters and buffers to the values of the first rank, in place. All ranks call this.

    A parameter that is distributed over a tensor or expert axis gets the values of the first rank with the same part.

    Tensors are broadcast one by one, as bytes. A tensor on another device is copied to the mesh's device meanwhile.
    Tensors on the meta device are skipped: they are initialised later, with the same values on all ranks. Parameters
    named in `ignored` keep their values.
    """
    named = (*model.named_parameters(), *quantization_tensors(model))
    for tensor in (*(tensor for name, tensor in named if name not in ignored), *model.buffers()):
        if not tensor.is_meta and tensor.numel() > 0:
            _broadcast(local_part(tensor.detach()), replicas_of(tensor, axes))


def _broadcast(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    # No copy if the tensor is contiguous and on the device.
    flat = tensor.detach().to(device_of(mesh)).contiguous().reshape(-1)
    for group in axis_groups(mesh):  # from (0, 0) to all (i, 0), and from these to all (i, j)
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
    if flat.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))

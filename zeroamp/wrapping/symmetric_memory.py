"""`zeroamp.symmetric_memory`: makes all-gathers write to memory that GPUs share over NVLink.

FSDP2's own `set_symm_mem_for_comm` refuses custom collectives. So zeroamp's all-gather of each group delegates to the
class that `set_symm_mem_for_comm` uses.
"""

import logging

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.hooks._torch.fsdp import AllGather
from zeroamp.hooks._torch.symmetric_memory import has_symmetric_all_gather, symmetric_all_gather
from zeroamp.planning.mesh import device_of, is_first_rank, shard_size
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.policy import Policy
from zeroamp.wrapping.two_levels import MeshNodes

logger = logging.getLogger("zeroamp")


def symmetric_gather(policy: Policy, mesh: DeviceMesh, nodes: MeshNodes) -> AllGather | None:
    """Return the all-gather in symmetric memory over the ranks that shard. All ranks of the mesh call this.

    Returns:
        FSDP2's all-gather. None if `zeroamp.symmetric_memory` is false, or if there is one shard.

    Raises:
        ConfigError: the torch version, device, backend, driver or another key does not allow symmetric memory.
    """
    if not policy.symmetric_memory:
        return None
    if reason := _why_not(policy, mesh, nodes):
        raise ConfigError(f"zeroamp.symmetric_memory is true, but {reason}")
    if shard_size(mesh) == 1:
        if is_first_rank(mesh):
            logger.info("zeroamp.symmetric_memory has no effect: no parameter is sharded, so nothing is all-gathered.")
        return None
    try:
        return symmetric_all_gather(mesh.get_group(mesh.ndim - 1), device_of(mesh))
    except RuntimeError as error:
        raise ConfigError(
            f"zeroamp.symmetric_memory is true, but the first all-gather in symmetric memory failed: {error}. The GPUs "
            "must reach each other's memory over NVLink. Remove the key."
        ) from error


def _why_not(policy: Policy, mesh: DeviceMesh, nodes: MeshNodes) -> str:
    if not has_symmetric_all_gather():
        return f"FSDP2 of torch {torch.__version__} has no all-gather in symmetric memory. Install torch 2.13 or newer."
    if mesh.device_type != "cuda" or not is_nccl(mesh.get_group(mesh.ndim - 1), mesh.device_type):
        backend = dist.get_backend_config(mesh.get_group(mesh.ndim - 1))
        return f"it needs NCCL on CUDA, and the mesh is on {mesh.device_type} with backend {backend}. Remove the key."
    if policy.hpz_partition_size > 1:
        return (
            f"zero_hpz_partition_size is {policy.hpz_partition_size}. All ranks that shard share the memory, not a "
            "part of them. Remove one of the keys."
        )
    if nodes.gathers:
        return 'all-gathers run in two levels between nodes. Set zeroamp.ranks_per_node to "off", or remove the key.'
    return ""


def is_nccl(group: dist.ProcessGroup, device_type: str) -> bool:
    """Return whether a process group uses NCCL for tensors of a device type."""
    return f"{device_type}:nccl" in dist.get_backend_config(group).split(",")

"""`zeroamp.symmetric_memory`: the all-gathers of a model write to memory that the GPUs of a node share.

FSDP2's own `set_symm_mem_for_comm` refuses custom collectives. Here the collective of each group delegates to the class
that FSDP2 would use.
"""

import logging

import torch
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.hooks._torch.fsdp import AllGather
from zeroamp.hooks._torch.symmetric_memory import has_symmetric_all_gather, symmetric_all_gather
from zeroamp.planning.mesh import device_of, is_first_rank, shard_size
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.policy import Policy
from zeroamp.wrapping.connect import is_nccl
from zeroamp.wrapping.nodes import MeshNodes

logger = logging.getLogger("zeroamp")


def symmetric_gather(policy: Policy, mesh: DeviceMesh, nodes: MeshNodes) -> AllGather | None:
    """Return the all-gather in symmetric memory over the ranks that shard. All ranks of the mesh call this.

    Returns:
        None if the policy does not ask for it, or one rank holds whole parameters: nothing is all-gathered then.

    Raises:
        ConfigError: this torch, the device, the backend, the driver or another key does not allow it.
    """
    if not policy.symmetric_memory:
        return None
    if reason := _why_not(policy, mesh, nodes):
        raise ConfigError(f"zeroamp.symmetric_memory is true, but {reason}")
    if shard_size(mesh) == 1:
        if is_first_rank(mesh):
            logger.info("zeroamp.symmetric_memory has no effect where one rank holds whole parameters.")
        return None
    try:
        return symmetric_all_gather(mesh.get_group(mesh.ndim - 1), device_of(mesh))
    except RuntimeError as error:
        raise ConfigError(
            f"zeroamp.symmetric_memory is true, but the first all-gather in such memory failed: {error}. The GPUs must "
            "reach each other's memory over NVLink. Remove the key."
        ) from error


def _why_not(policy: Policy, mesh: DeviceMesh, nodes: MeshNodes) -> str:
    if not has_symmetric_all_gather():
        return f"FSDP2 of torch {torch.__version__} has no such all-gather. Install torch 2.13 or newer."
    if mesh.device_type != "cuda" or not is_nccl(mesh.get_group(mesh.ndim - 1), mesh.device_type):
        return f"it needs NCCL on CUDA, and the mesh is on {mesh.device_type}. Remove the key."
    if policy.recovery:
        # A rank that failed sends zeros from other memory: NCCL would choose another algorithm there than elsewhere.
        return (
            "zeroamp.recovery is too. The zeros of a rank that failed are not in such memory. Remove one of the keys."
        )
    if policy.hpz_partition_size > 1:
        return "zero_hpz_partition_size is set. The memory is shared by the ranks that shard, not by a part of them."
    if nodes.gathers:
        return 'all-gathers run in two levels between nodes. Set zeroamp.ranks_per_node to "off", or remove the key.'
    return ""

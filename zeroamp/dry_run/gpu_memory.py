"""The memory of GPUs, and the part of it that NCCL takes."""

from zeroamp.planning.group_dtypes import group_dtypes
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.planning.schedule import live_units, reshards_after_forward
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.numbers import is_finite
from zeroamp.policies.policy import Policy

GPUS_GB = {"a100-40gb": 40, "a100": 80, "h100": 80, "h200": 141, "b200": 180, "mi300x": 192, "l40s": 48}
"""Name of a GPU -> its memory in 10^9 bytes, by the vendor's data sheet. Devices report more: an "80 GB" one has
79 GiB, which is 85 x 10^9 bytes. The difference is a reserve for fragmentation and the workspaces of libraries."""

BYTES_OF_FIRST_COMMUNICATOR = 1_060_000_000
"""GPU memory of a process with one NCCL communicator of a ring, the driver's context included. A user measured it on
8 x H100 (https://github.com/NVIDIA/nccl/issues/1685)."""
BYTES_OF_COMMUNICATOR = 500_000_000
"""GPU memory of each further communicator. An assumption: the first one's without the driver's context, about half."""
BYTES_PER_PEER = 32 * 14 * 2**20
"""GPU memory of an all-to-all per other rank of the node: 32 channels, each with buffers of 10, 2 and 2 MiB. For 7
ranks this is the 3.28 GB that the same user measured at the first all-to-all. Peers in other nodes share buffers, which
are not counted."""


def memory_of(gpu: str | float) -> int:
    """Return the memory of a GPU in bytes. `gpu` is a name in `GPUS_GB`, or the memory in 10^9 bytes.

    Raises:
        ConfigError: there is no such name, or the number is not positive.
    """
    gigabytes = GPUS_GB.get(gpu) if isinstance(gpu, str) else gpu
    if not is_finite(gigabytes, above=0):
        raise ConfigError(
            f"gpu must be one of {', '.join(GPUS_GB)}, or the memory of another GPU in GB (10^9 bytes), but is {gpu!r}."
        )
    return int(gigabytes * 1e9)


def nccl_bytes(plan: Plan, ranks: Ranks, gpus_per_node: int) -> int:
    """Return the GPU memory that NCCL takes outside of torch's allocator, the driver's context included.

    The sum of the constants of this file: the first communicator; one more each for replicas and the second
    level; one for each group with a partition (hpZ); and the buffers of all-to-alls inside the node.
    """
    policy = plan.policy
    num_shards, num_replicas = ranks.shards(policy) or 1, ranks.num_replicas or 1
    if num_shards * num_replicas == 1:
        return 0
    live, num_partitions = live_units(plan), 0
    if policy.hpz_partition_size > 1:
        num_partitions = sum(reshards_after_forward(group.kind, group.unit, plan, live) for group in plan.groups)
    further = (num_shards > 1 and num_replicas > 1) + num_partitions
    further += _has_two_levels(policy, num_shards, gpus_per_node)
    num_peers = 0
    if any(group_dtypes(group.key, policy, ranks).reduction == "all_to_all" for group in plan.groups):
        # The ranks of a tensor axis share a node.
        num_peers = max(1, min(num_shards, max(1, gpus_per_node // ranks.num_tensor))) - 1
    return BYTES_OF_FIRST_COMMUNICATOR + further * BYTES_OF_COMMUNICATOR + num_peers * BYTES_PER_PEER


def _has_two_levels(policy: Policy, num_shards: int, gpus_per_node: int) -> bool:
    """Return whether collectives over the shards run inside of nodes and between them (`zeroamp.ranks_per_node`)."""
    per_node = gpus_per_node if policy.ranks_per_node == "auto" else policy.ranks_per_node
    if per_node == "off" or policy.reduce_accumulate_dtype != "fp32":
        return False
    is_power_of_two = per_node & (per_node - 1) == 0
    return is_power_of_two and 1 < per_node < num_shards and num_shards % per_node == 0

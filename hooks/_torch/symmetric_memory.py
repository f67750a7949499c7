"""FSDP2's all-gather in symmetric memory (torch 2.13 and newer).

The code follows the sources of torch 2.13.0 and 2.15.0. It has not run on a GPU. torch 2.11 has symmetric memory, but
its FSDP2 does not use it.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from zeroamp.hooks._torch.fsdp import AllGather


def has_symmetric_all_gather() -> bool:
    """Return whether FSDP2 of this torch has an all-gather in symmetric memory."""
    return hasattr(_fsdp_collectives, "SymmMemAllGather")


def symmetric_all_gather(group: dist.ProcessGroup, device: torch.device) -> AllGather:
    """Return FSDP2's all-gather in symmetric memory, tested by one all-gather of one element per rank.

    All ranks of `group` must call this, and must allocate its outputs in the same order and with the same sizes.

    Raises:
        RuntimeError: the device, the driver or NCCL cannot share memory between the ranks. torch has no error class of
            its own for this.
    """
    gather: AllGather = _fsdp_collectives.SymmMemAllGather(group)
    output = gather.allocate((group.size(),), dtype=torch.float32, device=device)
    rank = group.rank()
    output[rank] = rank
    gather(output, output[rank : rank + 1], group)
    if output.tolist() != list(range(group.size())):
        raise RuntimeError(f"an all-gather in symmetric memory over {group.size()} ranks returned {output.tolist()}")
    return gather

"""Compares the replicas of sharded tensors before a save, which stores only one replica of each shard.

At stage 0 and with HSDP, several ranks hold the same shard. torch.distributed.checkpoint writes parts of a tensor from
different replicas, so replicas that have diverged would be saved as a mixture.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeroamp.checkpoint.model_state import MODEL
from zeroamp.planning.mesh import local_part, replicate_size
from zeroamp.policies.dtypes import INTEGER_BY_NUM_BYTES
from zeroamp.policies.errors import CheckpointError
from zeroamp.wrapping.rank_group import RankGroup
from zeroamp.wrapping.state import wrap_state

_CHUNK = 2**22
_FACTOR = 6364136223846793005  # odd, so that no chunk's sum is lost modulo 2^64


def checksums(tensors: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, int]:
    """Return a checksum of this rank's shard of each DTensor, by name; {} if the mesh has no replicas.

    Waits for the device. Reads each shard once, with 64 MiB of temporary memory at most.
    """
    if replicate_size(mesh) == 1:
        return {}
    sums = {name: checksum(local_part(tensor)) for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    return {name: int(total) for name, total in sums.items()}


@torch.no_grad()
def checksum(tensor: torch.Tensor, *, chunk: int = _CHUNK) -> torch.Tensor:
    """Return a number that changes with any bit of a tensor and with the order of its elements: 0-D int64.

    Modulo 2^64, for each chunk c: total = total x factor + sum over i of bits(c[i]) x (2i + 1). For a tensor subclass
    with inner tensors, it is the sum of their checksums.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return torch.stack([checksum(getattr(tensor, name), chunk=chunk) for name in names]).sum()
    bits = tensor.detach().contiguous().reshape(-1).view(INTEGER_BY_NUM_BYTES[tensor.dtype.itemsize])
    weights = 2 * torch.arange(min(chunk, bits.numel()), device=bits.device) + 1  # int64
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(chunk):  # type: ignore[no-untyped-call]
        total = total * _FACTOR + (part * weights[: part.numel()]).sum()
    return total


def refuse_different_replicas(sums: dict[str, int], mesh: DeviceMesh, ranks: RankGroup) -> None:
    """Raise CheckpointError if two ranks that hold the same shard have different checksums of it. All ranks call this.

    The ranks compare one digest per shard. Only where these differ, they send each other the checksums.

    Args:
        sums: what `checksums` returned on this rank.
        mesh: 1-D, or 2-D (replicate, shard).
        ranks: the mesh's ranks.
    """
    if mesh.ndim == 1 or mesh.size(0) == 1:
        return
    if not all(ranks.are_equal({mesh.get_local_rank(1): sums}, mesh.size(1))):
        _refuse_differing(ranks.run(lambda: sums), mesh)


def _refuse_differing(of_ranks: list[dict[str, int]], mesh: DeviceMesh) -> None:
    order = {rank: index for index, rank in enumerate(sorted(mesh.mesh.flatten().tolist()))}
    for name in of_ranks[0]:
        for replicas in mesh.mesh.t().tolist() if mesh.ndim == 2 else ():
            values = [of_ranks[order[rank]][name] for rank in replicas]
            others = [rank for rank, value in zip(replicas, values, strict=True) if value != values[0]]
            if others:
                raise CheckpointError(
                    f"{name} must be the same on ranks {', '.join(map(str, replicas))}, which are replicas, but "
                    f"differs on {', '.join(map(str, others))}. A rank was updated outside of TrainStep, or with "
                    "other settings. Load the last checkpoint."
                )


def refuse_different_scalars(differing: Sequence[str], root: nn.Module) -> None:
    """Raise CheckpointError if a 0-D parameter, which every rank holds whole, is among the tensors that differ.

    Parameters of `ignored_params` may differ.
    """
    ignored = wrap_state(root).plan.ignored_fqns
    scalars = {MODEL + fqn for fqn, parameter in root.named_parameters() if parameter.dim() == 0 and fqn not in ignored}
    name = next((name for name in differing if name in scalars), None)
    if name is not None:
        raise CheckpointError(
            f"{name} must be the same on all ranks, but differs. A rank was updated outside of TrainStep, or with "
            "other settings. Load the last checkpoint."
        )

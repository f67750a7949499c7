"""Digests of tensors, by which ranks find out before a save whether their values are the same.

At stage 0 and with HSDP, several ranks hold the same shard. torch.distributed.checkpoint writes parts of a tensor from
different replicas, so replicas that have diverged would be saved as a mixture.
"""

from collections.abc import Sequence
from hashlib import sha256

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.checkpoint.model_state import MODEL
from zeroamp.hooks._torch.dtensor import split_dim
from zeroamp.planning.mesh import local_part
from zeroamp.policies.dtypes import INTEGER_BY_NUM_BYTES
from zeroamp.policies.errors import CheckpointError
from zeroamp.wrapping.state import wrap_state

_CHUNK = 2**22
_FACTOR = 6364136223846793005  # odd, so that no chunk's sum is lost modulo 2^64


def plain_digest(tensor: torch.Tensor) -> str:
    """Return dtype, shape and digest of a plain tensor, such as "float32[3,4] 1f2e…"."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    form = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}".replace(" ", "")
    return f"{form} {sha256(content.numpy().tobytes()).hexdigest()}"


def shard_digest(tensor: DTensor, *, has_replicas: bool) -> str:
    """Return "sharded", and if other ranks hold the same shard also its place in the mesh and its checksum."""
    if not has_replicas:
        return "sharded"
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or range(mesh.ndim)
    is_split = [split_dim(placement) is not None for placement in tensor.placements]
    place = [f"{names[axis]}={mesh.get_local_rank(axis)}" for axis in range(mesh.ndim) if is_split[axis]]
    return f"sharded {','.join(place) or 'whole'} {int(checksum(local_part(tensor)))}"


@torch.no_grad()
def checksum(tensor: torch.Tensor, *, chunk: int = _CHUNK) -> torch.Tensor:
    """Return a checksum that depends on every bit of a tensor and on the order of its elements: 0-D int64.

    Modulo 2^64, for each chunk c: total = total x factor + sum over i of bits(c[i]) x (2i + 1). Takes 64 MiB of
    temporary memory at most.
    """
    bits = tensor.detach().contiguous().reshape(-1).view(INTEGER_BY_NUM_BYTES[tensor.dtype.itemsize])
    weights = 2 * torch.arange(min(chunk, bits.numel()), device=bits.device) + 1  # int64
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(chunk):  # type: ignore[no-untyped-call]
        total = total * _FACTOR + (part * weights[: part.numel()]).sum()
    return total


def refuse_different_replicas(digests: list[dict[str, str]], ranks: Sequence[int], root: nn.Module) -> None:
    """Raise CheckpointError if ranks that must hold the same values have different digests of them.

    Ranks that hold the same shard are replicas, and every rank holds 0-D parameters whole. Those of `ignored_params`
    may differ.

    Args:
        digests: tensor name -> digest, of each rank.
        ranks: the ranks.
        root: the model.
    """
    ignored = wrap_state(root).plan.ignored_fqns
    whole = {MODEL + fqn for fqn, parameter in root.named_parameters() if parameter.dim() == 0 and fqn not in ignored}
    for name in digests[0]:
        by_place: dict[str, dict[int, str]] = {}
        for rank, of_rank in zip(ranks, digests, strict=True):
            form, *rest = of_rank[name].split()
            if (form == "sharded" and rest) or name in whole:
                by_place.setdefault(rest[0] if form == "sharded" else "", {})[rank] = rest[-1]
        for sums in by_place.values():
            first = next(iter(sums.values()))
            if others := [rank for rank, total in sums.items() if total != first]:
                raise CheckpointError(
                    f"{name} must be the same on ranks {', '.join(map(str, sums))}, which are replicas, but "
                    f"differs on {', '.join(map(str, others))}. A rank was updated outside of TrainStep, or with "
                    "other settings. Load the last checkpoint."
                )

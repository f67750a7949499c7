"""Makes and checks the device mesh of each ZeRO stage, and reads numbers of ranks and shards from meshes."""

import atexit
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.dtensor import is_strided, split_dim
from zeroamp.hooks._torch.fsdp import timeout_of
from zeroamp.hooks._torch.process_groups import group_of_parts, of_default_group
from zeroamp.planning.rank_device import choose_device
from zeroamp.policies.errors import ConfigError, WrapError, describe
from zeroamp.policies.numbers import WORLD_SIZE
from zeroamp.policies.policy import Policy, Stage

logger = logging.getLogger("zeroamp")
REPLICATE, SHARD = "replicate", "shard"
_SIZES_OF_LAUNCHERS = (WORLD_SIZE, "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def mesh_for_stage(stage: Stage, mesh: DeviceMesh | None, num_replicas: int = 1) -> DeviceMesh:
    """Return the mesh that FSDP2 gets: 1-D (shard) or 2-D (replicate, shard).

    Stage 0 shards over one rank and replicates over all N ranks: the mesh has the shape (N, 1). Stages 1 to 3 use the
    given mesh. Without one they have all ranks in one axis, or in two if `num_replicas` is not 1. If there is no
    process group, one is initialised: see `start_process_group`.

    Args:
        stage: 0 to 3.
        mesh: the caller's, or None.
        num_replicas: `zeroamp.dp_replicate_size`. 1 stands for its default.

    Raises:
        WrapError: the stage cannot use a mesh of this shape, or a process group cannot be made.
        ConfigError: `num_replicas` does not divide the ranks, or differs from the replicas of the mesh.
    """
    if mesh is None:
        if not dist.is_initialized():
            start_process_group()
        if stage == 0 and dist.get_world_size() > 1:
            return _over_one_shard(_shared_mesh(current_device_type(), (dist.get_world_size(),)))
        shape = mesh_shape(stage, dist.get_world_size(), num_replicas)
        return _shared_mesh(current_device_type(), shape)
    _refuse_unusable(stage, mesh)
    if num_replicas not in (1, replicate_size(mesh)):
        raise ConfigError(_replicas(num_replicas, f"{replicate_size(mesh)}, the replicas of the mesh given"))
    return _over_one_shard(mesh) if stage == 0 and mesh.ndim == 1 else mesh


def _over_one_shard(mesh: DeviceMesh) -> DeviceMesh:
    """Return a 1-D mesh as one of the shape (N, 1).

    Only this rank makes the group of its shard, because the mesh may be a slice of a larger one, whose other ranks are
    not here. `init_device_mesh` would make the groups of all ranks, one after the other. If `init_process_group` got a
    `device_id`, NCCL would also make a communicator of each.
    """
    groups = [mesh.get_group(), group_of_parts([[dist.get_rank()]], use="shard axis of one rank")]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh.view(-1, 1), mesh_dim_names=(REPLICATE, SHARD))


_meshes: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], DeviceMesh]]" = WeakKeyDictionary()
"""Default group -> device type and shape -> the mesh of all ranks."""


def _shared_mesh(device_type: str, shape: tuple[int, ...]) -> DeviceMesh:
    """Return the mesh of all ranks with this shape. All models of a process share its process groups."""
    meshes = of_default_group(_meshes)
    if (device_type, shape) not in meshes:
        names = (REPLICATE, SHARD)[-len(shape) :]
        meshes[device_type, shape] = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return meshes[device_type, shape]


def start_process_group() -> None:
    """Initialise the default process group from torchrun's environment. Without RANK it gets a world size of one.

    The group has the default backends: gloo, and NCCL (or the like) for an accelerator, whose device is chosen first:
    see `choose_device`. A group of one rank is destroyed when the program ends.

    Raises:
        WrapError: the environment has no RANK, but another launcher's variable has a world size above one; or there is
            no device of this rank.
    """
    if "RANK" in os.environ:
        choose_device(current_device_type())
        dist.init_process_group()
        return
    for name in _SIZES_OF_LAUNCHERS:
        if os.environ.get(name, "") not in ("", "1"):
            raise WrapError(
                f"wrap_model found no process group and no RANK in the environment, but {name} is {os.environ[name]}: "
                "each process would train by itself. Start the script with torchrun, or call "
                "torch.distributed.init_process_group first."
            )
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, in torch's documentation
    dist.init_process_group(store=store, rank=0, world_size=1)
    atexit.register(_destroy_process_group)
    num_devices = torch.accelerator.device_count()
    level = logging.WARNING if num_devices > 1 else logging.INFO
    logger.log(
        level,
        "Made a process group of one rank, because the environment has no RANK. To train on several ranks, start the "
        "script with torchrun.",
    )


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def mesh_shape(stage: Stage, num_ranks: int, num_replicas: int = 1) -> tuple[int, ...]:
    """Return the shape of the mesh for `num_ranks` ranks if the caller gives none: (shard,) or (replicate, shard).

    Raises:
        ConfigError: `num_replicas` does not divide the ranks.
    """
    if stage == 0:
        return (num_ranks, 1)
    if num_replicas == 1:
        return (num_ranks,)
    if num_ranks % num_replicas:
        raise ConfigError(_replicas(num_replicas, f"a divisor of the {num_ranks} ranks"))
    return (num_replicas, num_ranks // num_replicas)


def _refuse_unusable(stage: Stage, mesh: DeviceMesh) -> None:
    shape = tuple(mesh.mesh.shape)
    if mesh.ndim not in (1, 2) or (stage == 0 and mesh.ndim == 2 and shape[1] != 1):
        valid = "1-D (all ranks replicate)" if stage == 0 else "1-D (shard) or 2-D (replicate, shard)"
        found, remedy = f"of shape {shape} at stage {stage}", "Slice the axes of data parallelism out of it first."
        raise WrapError(describe("mesh", found, valid, remedy))
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise WrapError('The 2-D mesh has no axis names. Make it with mesh_dim_names=("replicate", "shard").')


def _replicas(found: int, valid: str) -> str:
    return describe("zeroamp.dp_replicate_size", str(found), valid, "Change it, or leave it out and pass a mesh.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The numbers of ranks of a mesh, by what they are for."""

    num_shards: int | None = None
    """Ranks over which one parameter is sharded. None: not known; bytes are then counted without padding."""
    num_replicas: int | None = None
    """Ranks with the same shard. None: the mesh has no such axis, or (with `num_shards` None) it is not known."""
    num_tensor: int = 1
    """Ranks of the tensor axis, which the other numbers do not include."""
    num_expert: int = 1
    """Parts into which the experts are distributed. FSDP2 shards each part over `num_shards` / `num_expert` ranks."""

    @property
    def is_one(self) -> bool:
        """Whether there is one shard and one replica, so that gradients are not reduced."""
        return self.num_shards == 1 and (self.num_replicas or 1) == 1

    @property
    def num_ranks(self) -> int | None:
        """The number of shards times the number of replicas; None if it is not known."""
        return None if self.num_shards is None else self.num_shards * (self.num_replicas or 1)

    def of(self, *, is_expert: bool) -> "Ranks":
        """Return the ranks over which FSDP2 shards a parameter that is, or is not, an expert."""
        if not is_expert or self.num_expert == 1 or self.num_shards is None:
            return self
        return replace(self, num_shards=self.num_shards // self.num_expert, num_expert=1)

    def shards(self, policy: Policy) -> int | None:
        """Return the number of ranks over which a parameter is sharded: 1 at stage 0, None if it is not known."""
        return 1 if policy.stage == 0 else self.num_shards


def ranks_of(mesh: DeviceMesh) -> Ranks:
    """Return the shape of a mesh that `mesh_for_stage` returned."""
    return Ranks(num_shards=shard_size(mesh), num_replicas=replicate_size(mesh) if mesh.ndim == 2 else None)


def expected_shards(policy: Policy, mesh: DeviceMesh | None) -> int:
    """Return the number of ranks over which a parameter will be sharded in the mesh of `mesh_for_stage`.

    `mesh` is the caller's. A process group must be initialised. Communicates nothing.

    Raises:
        ConfigError: `policy.dp_replicate_size` does not divide the ranks.
    """
    if policy.stage == 0:
        return 1
    if mesh is not None:
        return shard_size(mesh)
    return mesh_shape(policy.stage, dist.get_world_size(), policy.dp_replicate_size)[-1]


def process_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return a process group of all ranks of the mesh; None is the default group. All ranks of the mesh call this."""
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        return None
    timeout = timeout_of(mesh.get_group(0), mesh.device_type)
    return group_of_parts([mesh.mesh.flatten().tolist()], timeout, use="all ranks of a mesh")


def axis_groups(mesh: DeviceMesh) -> Iterator[dist.ProcessGroup]:
    """Yield the process groups of the axes with several ranks, in the order of the axes.

    Axes of one rank are left out: NCCL would make a communicator for a collective that changes nothing.
    """
    return (mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1)


def parts_of_axis(mesh: DeviceMesh, axis: int) -> list[list[int]]:
    """Return the global ranks of each line of the mesh along an axis. Each rank of the mesh is in one of them."""
    parts: list[list[int]] = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist()
    return parts


def refuse_partition(policy: Policy, num_shards: int) -> None:
    """Raise ConfigError if `policy.hpz_partition_size` does not divide the number of ranks that shard.

    All ranks of the shard axis are a valid size, with the effect of 1: FSDP2's `reshard_after_forward=True`.
    """
    size = policy.hpz_partition_size
    if num_shards % size == 0:
        return
    divisors = [str(number) for number in range(1, num_shards + 1) if num_shards % number == 0]
    raise ConfigError(
        describe(
            "zero_optimization.zero_hpz_partition_size",
            size,
            f"a divisor of the {num_shards} ranks that shard ({', '.join(divisors)})",
            "Leave it out, or set it to the number of ranks of one machine.",
        )
    )


def current_device_type() -> str:
    """Return the type of this machine's accelerator, or "cpu" without one, as FSDP2 does."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def shard_size(mesh: DeviceMesh) -> int:
    """Return the number of ranks over which one parameter is sharded."""
    return mesh.size(mesh.ndim - 1)


def replicate_size(mesh: DeviceMesh) -> int:
    """Return the number of replicas: ranks with the same shard."""
    return mesh.size() // shard_size(mesh)


def shard_device(policy: Policy, mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank's shards of parameters, gradients and optimizer state."""
    return torch.device("cpu") if policy.offload.to_cpu else device_of(mesh)


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device for a mesh: the current device of the mesh's type."""
    return device_of_type(mesh.device_type)


def device_of_type(device_type: str) -> torch.device:
    """Return this rank's current device of a type."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def is_first_rank(mesh: DeviceMesh) -> bool:
    """Return whether this rank is the first of the mesh. The first rank logs and writes files."""
    return dist.get_rank() == int(mesh.mesh.flatten()[0])


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, in the same memory; other tensors are returned as they are.

    With gradients enabled this is an autograd function. Under `torch.no_grad` it only reads an attribute.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Return the slices, one per dimension, that select this rank's shard from the whole tensor.

    Each axis shards a remaining length d in parts of ceil(d / ranks); the last parts may be shorter or empty. If tensor
    parallelism and FSDP2 shard the same dimension, tensor parallelism comes first.
    """
    starts, lengths = [0] * tensor.dim(), list(tensor.shape)
    for axis in sorted(range(tensor.device_mesh.ndim), key=lambda axis: is_strided(tensor.placements[axis])):
        if (dim := split_dim(tensor.placements[axis])) is not None:
            part = math.ceil(lengths[dim] / tensor.device_mesh.size(axis))
            start = min(part * tensor.device_mesh.get_local_rank(axis), lengths[dim])
            starts[dim], lengths[dim] = starts[dim] + start, min(part, lengths[dim] - start)
    if (found := tuple(local_part(tensor.detach()).shape)) != tuple(lengths):
        raise AssertionError(f"expected a shard of shape {lengths} by {tensor.placements}, got {found}")
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))


def sharded_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return a DTensor with this rank's shard `local`, of the shape, mesh and placements of `like`."""
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def num_shards_of(tensor: torch.Tensor) -> int:
    """Return the number of parts that a tensor is sharded into, over all axes; 1 for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    placements = enumerate(tensor.placements)
    return math.prod(tensor.device_mesh.size(axis) for axis, kind in placements if split_dim(kind) is not None)


def num_copies(tensor: torch.Tensor, num_ranks: int) -> int:
    """Return how many of all `num_ranks` ranks have the same shard of a tensor.

    For the gradient norm: if each rank divides its sum of squares by this number, the sum over all ranks counts every
    element once.
    """
    return num_ranks // num_shards_of(tensor)

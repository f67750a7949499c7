"""Compares meshes for a run: replicas x shards and secondary partitions, each planned with the same micro-batch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from zeroamp.dry_run.step_time import StepTime
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.planning.shard_sizes import padded_numel
from zeroamp.policies.errors import some_of

LONGEST_RING = 1024
"""The latency of a ring of more ranks than this is avoided. A collective takes as many hops as the ring has ranks."""
EQUAL_TIME = 0.005
"""Meshes count as equally fast if their steps are at most this fraction longer than the shortest step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """A mesh to plan: its ranks, secondary partition and levels."""

    num_replicas: int
    num_shards: int
    partition: int = 1
    """Ranks of the secondary partition (hpZ), `zero_optimization.zero_hpz_partition_size`. 1: none."""
    ranks_per_node: int | None = None
    """Ranks per node of collectives in two levels, `zeroamp.ranks_per_node`. None: the config's."""

    def __str__(self) -> str:
        """Return replicas x shards as `--mesh` accepts them, then the partition and the levels."""
        text = f"{self.num_replicas}x{self.num_shards}"
        text += f" hpZ {self.partition}" if self.partition > 1 else ""
        return text if self.ranks_per_node is None else f"{text} two levels"

    @property
    def ranks(self) -> Ranks:
        """Return the numbers of ranks. With one replica the mesh has one axis."""
        return Ranks(num_shards=self.num_shards, num_replicas=self.num_replicas if self.num_replicas > 1 else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshPlan:
    """Predicted memory and time of a run on one mesh."""

    shape: MeshShape
    peak_bytes: int
    """Peak memory of one rank with NCCL's. The optimizer's is scaled from that with another number of shards."""
    fits: bool
    time: StepTime
    padding: float
    """Elements of padding, which are stored and communicated too, as a fraction of the parameters' elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshAdvice:
    """The meshes that were compared at one stage, by number of shards, and the best of them."""

    tried: tuple[MeshPlan, ...]
    best: MeshPlan
    """The fastest mesh that fits. If none fits, the one with the least memory."""
    reason: str
    """Why it is the best, as `plan` prints it."""


def shapes_to_try(
    world_size: int, gpus_per_node: int, *, with_partition: bool, with_levels: bool = False
) -> Iterator[MeshShape]:
    """Yield shards over one node, over 2, 4, … nodes, and over all ranks; then a partition inside a node.

    Yields nothing on one node, or if nodes are not full. `with_levels`: also yield shards over several nodes in two
    levels.
    """
    if world_size <= gpus_per_node or world_size % gpus_per_node or gpus_per_node == 1:
        return
    sizes = [gpus_per_node * 2**power for power in range((world_size // gpus_per_node).bit_length())]
    for num_shards in sorted({size for size in sizes if world_size % size == 0} | {world_size}):
        shape = MeshShape(num_replicas=world_size // num_shards, num_shards=num_shards)
        yield shape
        if with_levels and num_shards > gpus_per_node:
            yield replace(shape, ranks_per_node=gpus_per_node)
    if with_partition:
        yield MeshShape(num_replicas=1, num_shards=world_size, partition=gpus_per_node)


def advise(shapes: Sequence[MeshShape], plan_mesh: Callable[[MeshShape], MeshPlan]) -> MeshAdvice | None:
    """Plan each mesh, and choose the best. Returns None if there is no mesh to try.

    Among equally fast meshes (`EQUAL_TIME`), those with at most `LONGEST_RING` shards are preferred, since their rings
    are short without two levels too, and then those with less memory.
    """
    tried = [plan_mesh(shape) for shape in shapes]
    if not tried:
        return None
    fitting = [mesh for mesh in tried if mesh.fits]
    if not fitting:
        best = min(tried, key=lambda mesh: mesh.peak_bytes)
        return MeshAdvice(tried=tuple(tried), best=best, reason="no mesh fits; this one needs the least memory")
    shortest = min(mesh.time.total for mesh in fitting)
    equal = [mesh for mesh in fitting if mesh.time.total <= (1 + EQUAL_TIME) * shortest]
    best = min(equal, key=lambda mesh: (mesh.shape.num_shards > LONGEST_RING, mesh.peak_bytes))
    return MeshAdvice(tried=tuple(tried), best=best, reason=_reason(best, tried, fitting))


def _reason(best: MeshPlan, tried: Sequence[MeshPlan], fitting: Sequence[MeshPlan]) -> str:
    flat = next(mesh for mesh in tried if mesh.shape.num_replicas == 1)
    parts = []
    if flat is best:
        parts.append(
            f"within {EQUAL_TIME:.1%} of the fastest mesh that fits, and of such meshes the one with the least memory"
        )
    else:
        parts.append(f"{best.time.total:.3g} s per step, {flat.time.total:.3g} s with one replica ({flat.shape})")
        for what, own, other in (
            ("latency", best.time.latency, flat.time.latency),
            ("exposed", best.time.exposed, flat.time.exposed),
        ):
            if other - own > EQUAL_TIME * flat.time.total:
                parts.append(f"{what} {own:.3g} s instead of {other:.3g} s")
        if flat.padding - best.padding > 0.01:
            parts.append(f"padding {best.padding:.0%} instead of {flat.padding:.0%}")
    too_large = [mesh for mesh in tried if mesh.time.total < best.time.total and mesh not in fitting]
    if too_large:
        names = [str(mesh.shape) for mesh in too_large]
        parts.append(f"faster, but too large for the GPU: {some_of(names, 3)}")
    return "; ".join(parts)


def padding_of(plan: Plan, num_shards: int) -> float:
    """Return the elements of padding as a fraction of the elements of all sharded parameters."""
    params = [param for group in plan.groups for param in group.params]
    numel = sum(param.numel for param in params)
    return sum(padded_numel(param, num_shards) for param in params) / numel - 1 if numel else 0.0

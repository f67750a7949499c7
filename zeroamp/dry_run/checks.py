"""Checks the arguments of `plan_run` before anything is computed: numbers, the mesh, the stages."""

from collections.abc import Sequence

from zeroamp.planning.mesh import Ranks, mesh_shape, replicate_size, shard_size
from zeroamp.planning.mesh_axes import MeshAxes
from zeroamp.policies.errors import ConfigError, describe
from zeroamp.policies.numbers import is_integer
from zeroamp.policies.policy import Policy, Stage

STAGES: tuple[Stage, ...] = (0, 1, 2, 3)


def check_counts(**values: int | None) -> None:
    """Check counts of ranks, samples and tokens. None stands for the default.

    Raises:
        ConfigError: a count is not an integer of 1 or more.
    """
    for name, value in values.items():
        if value is not None and not is_integer(value, at_least=1):
            raise _refused(name, value, "an integer >= 1")


def check_mesh_and_stages(mesh: Sequence[int] | None, stages: Sequence[Stage]) -> None:
    """Check the form of the mesh and the stages. `possible_stages` checks the mesh against the ranks and the config.

    Raises:
        ConfigError: the mesh is not a pair of integers of 1 or more, or the stages are empty or not in 0 to 3.
    """
    if mesh is not None and not (len(mesh) == 2 and all(is_integer(size, at_least=1) for size in mesh)):
        raise _refused("mesh", mesh, "(replicas, shards), each an integer >= 1, or None")
    if not stages or not all(is_integer(stage, at_least=0) and stage in STAGES for stage in stages):
        raise _refused("stages", stages, f"one or more of {', '.join(map(str, STAGES))}")


def check_axes(axes: MeshAxes, world_size: int) -> tuple[int, int]:
    """Return (replicas, shards) of the ranks over which FSDP2 shards in a named mesh.

    Raises:
        ConfigError: the mesh has another number of ranks.
    """
    if axes.whole.size() != world_size:
        raise _refused("world_size", world_size, f"{axes.whole.size()}, the ranks of mesh")
    return replicate_size(axes.fsdp), shard_size(axes.fsdp)


def _refused(name: str, found: object, valid: str) -> ConfigError:
    return ConfigError(describe(f"plan_run({name}=)", repr(found), valid, "Change it."))


def ranks_at(policy: Policy, world_size: int, mesh: tuple[int, int] | None) -> Ranks:
    """Return the shards and replicas that `wrap_model` would make at the policy's stage.

    `mesh` is (replicas, shards), or None for those of the config and the number of ranks.

    Raises:
        ConfigError: the mesh has another number of ranks or replicas than the run, or the secondary partition does not
            divide its shards.
    """
    if mesh is not None and mesh[0] * mesh[1] != world_size:
        valid = f"replicas x shards with {world_size} ranks in all"
        raise ConfigError(describe("mesh", f"{mesh[0]}x{mesh[1]}", valid, "Change the mesh or the number of ranks."))
    if mesh is not None and policy.dp_replicate_size not in (1, mesh[0]):
        valid, found = f"{mesh[0]}, the replicas of mesh", policy.dp_replicate_size
        raise ConfigError(
            describe("zeroamp.dp_replicate_size", found, valid, "Change the key, or leave out mesh to use the key's.")
        )
    if mesh is None or policy.stage == 0:
        *replicas, num_shards = mesh_shape(policy.stage, world_size, policy.dp_replicate_size)
    else:
        *replicas, num_shards = mesh
    if policy.stage == 3 and num_shards % policy.hpz_partition_size:
        where, valid = "zero_optimization.zero_hpz_partition_size", f"a divisor of the {num_shards} shards"
        raise ConfigError(describe(where, policy.hpz_partition_size, valid, "Change the key or the mesh."))
    return Ranks(num_shards=num_shards, num_replicas=replicas[0] if replicas else None)


def possible_stages(
    policy: Policy, stages: Sequence[Stage], world_size: int, mesh: tuple[int, int] | None
) -> tuple[list[tuple[Policy, Ranks]], dict[Stage, str]]:
    """Return the policy and ranks of each stage that the config and the mesh allow, and the reasons for the others.

    Raises:
        ConfigError: the policy's own stage is not allowed, or no stage is.
    """
    possible: list[tuple[Policy, Ranks]] = []
    refused: dict[Stage, str] = {}
    for stage in stages:
        try:
            of_stage = policy.replace(stage=stage)
            possible.append((of_stage, ranks_at(of_stage, world_size, mesh)))
        except ConfigError as error:
            if stage == policy.stage or (stage == stages[-1] and not possible):
                raise
            refused[stage] = str(error)
    return possible, refused

"""Which stages go with the config and the ranks, and how many replicas and shards each has."""

from collections.abc import Sequence

from zeroamp.planning.mesh import Ranks, mesh_shape
from zeroamp.policies.errors import ConfigError, describe
from zeroamp.policies.policy import Policy, Stage


def ranks_at(policy: Policy, world_size: int, mesh: tuple[int, int] | None) -> Ranks:
    """Return the mesh's shape that `wrap_model` would have at the policy's stage.

    `mesh` is (replicas, shards), or None for what the config and the number of ranks make of themselves.

    Raises:
        ConfigError: the mesh has another number of ranks or of replicas, or a secondary partition does not divide it.
    """
    if mesh is not None and mesh[0] * mesh[1] != world_size:
        valid = f"replicas x shards that make {world_size} ranks"
        raise ConfigError(describe("mesh", f"{mesh[0]}x{mesh[1]}", valid, "Change one of the two."))
    if mesh is not None and policy.dp_replicate_size not in (1, mesh[0]):
        found = f"{policy.dp_replicate_size} with a mesh of {mesh[0]} replicas"
        raise ConfigError(
            describe("zeroamp.dp_replicate_size", found, f"{mesh[0]}", "Change it, or leave the mesh to the config.")
        )
    given = mesh is not None and policy.stage > 0
    *replicas, num_shards = (
        mesh if mesh is not None and given else mesh_shape(policy.stage, world_size, policy.dp_replicate_size)
    )
    if policy.stage == 3 and num_shards % policy.hpz_partition_size:
        found = f"{policy.hpz_partition_size} with {num_shards} ranks that shard"
        raise ConfigError(
            describe("zero_optimization.zero_hpz_partition_size", found, "a divisor of them", "Change one of the two.")
        )
    return Ranks(num_shards=num_shards, num_replicas=replicas[0] if replicas else None)


def possible_stages(
    policy: Policy, stages: Sequence[Stage], world_size: int, mesh: tuple[int, int] | None
) -> tuple[list[tuple[Policy, Ranks]], dict[Stage, str]]:
    """Return the policies of the stages that go with all else, each with its ranks, and why the others do not.

    Raises:
        ConfigError: the policy's own stage does not, or none does.
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

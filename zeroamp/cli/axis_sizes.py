"""The sizes of the axes of a mesh, from the option `--mesh` of the commands."""

from dataclasses import dataclass

from zeroamp.planning.mesh_axes import ROLES
from zeroamp.policies.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisSizes:
    """The sizes of the axes of a mesh that is not made yet."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    names: tuple[str, ...] = ()
    """The names of the axes, as they were given."""

    @property
    def by_name(self) -> dict[str, int]:
        """The sizes in the order of a mesh: the ranks of the last axes are in one node."""
        roles = ("replicate", "shard", "context", "expert", "tensor")
        return {name: getattr(self, role) for role in roles for name in self.names if ROLES[name] == role}

    @property
    def distributes_parameters(self) -> bool:
        """Whether there is a tensor or expert axis of several ranks."""
        return self.tensor > 1 or self.expert > 1

    @property
    def num_data(self) -> int:
        """The number of ranks that get different samples. Batch sizes are multiplied by it."""
        return self.replicate * self.shard * self.expert

    @property
    def num_ranks(self) -> int:
        """The number of all ranks."""
        return self.num_data * self.context * self.tensor

    @property
    def num_shards(self) -> int:
        """The number of ranks over which FSDP2 shards parameters that are not experts."""
        return self.shard * self.context * self.expert


def axis_sizes(text: str) -> AxisSizes:
    """Parse a text such as "dp=8,tp=4,cp=2" into sizes of axes. Names are those of `ROLES`.

    Raises:
        ConfigError: a name is unknown, two names have the same role, or a size is not a whole number from 1 on.
    """
    sizes: dict[str, int] = {}
    found: list[str] = []
    for part in text.split(","):
        name, _, size = part.partition("=")
        role = ROLES.get(name)
        if role in (None, "pipeline") or role in sizes or not size.isdecimal() or int(size) < 1:
            names = ", ".join(name for name, role in ROLES.items() if role != "pipeline")
            raise ConfigError(
                f"A mesh must be NAME=SIZE parts, such as dp=8,tp=4,cp=2, but has the part {part!r}. Names: {names}. "
                "Each kind of axis may occur once. A size is a whole number from 1 on. Correct that part."
            )
        sizes[str(role)] = int(size)
        found.append(name)
    return AxisSizes(**sizes, names=tuple(found))

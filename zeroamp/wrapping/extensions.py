"""`WrapExtension`: the moments of `wrap_model` at which an `Extension` checks a run, or attaches to it."""

from torch import nn

from zeroamp.hooks.collectives.traffic import Traffic
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.mesh_axes import MeshAxes
from zeroamp.planning.plan import Plan
from zeroamp.policies.extensions import Extension
from zeroamp.wrapping.state import WrapState


class WrapExtension(Extension):
    """What one config key adds to a wrapped model. Here every method does nothing."""

    def check_model(self, model: nn.Module, plan: Plan) -> None:
        """Raise ConfigError or WrapError if the key does not fit the model. Nothing was communicated yet."""

    def check_mesh(self, model: nn.Module, plan: Plan, axes: MeshAxes) -> None:
        """Raise ConfigError or WrapError if the key does not fit the ranks. `axes`: those of the mesh.

        The plan and the mesh are the same on all ranks.
        """

    def attach(self, model: nn.Module, state: WrapState) -> None:
        """Change the hooks of the sharded model."""

    def add_traffic(self, plan: Plan, ranks: Ranks, traffic: Traffic) -> None:
        """Add this key's collectives of one optimizer step to `traffic`. Called by `plan_traffic`."""

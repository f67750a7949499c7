"""`PlanExtension`: the moments of `build_plan` at which an `Extension` changes the plan."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from zeroamp.planning.fp32_regions import Fp32Regions
from zeroamp.planning.parameter_uses import ParameterUses
from zeroamp.planning.precisions import Precision
from zeroamp.policies.extensions import Extension
from zeroamp.policies.policy import Policy


class PlanExtension(Extension):
    """What one config key adds to a plan. Here every method does nothing."""

    def fp32_regions(self, model: nn.Module, policy: Policy) -> Fp32Regions | None:
        """Return the modules and tensors that stay in fp32 in every mode; None for none. The units are known."""

    def safe_precisions(
        self,
        model: nn.Module,
        policy: Policy,
        uses: Sequence[ParameterUses],
        example_inputs: Any,
        device_type: str | None,
    ) -> Sequence[Precision] | None:
        """Return the precisions of the parameters `uses`, without fp32 regions and overrides. None: by their classes.

        Called in mode "autocast" only. `example_inputs` and `device_type` are the arguments of `build_plan`.
        """

    def precisions(
        self, model: nn.Module, policy: Policy, uses: Sequence[ParameterUses], precisions: Iterable[Precision]
    ) -> Iterable[Precision]:
        """Return the precisions of the parameters `uses`, in their order. `precisions`: those that they have so far."""
        del model, policy, uses
        return precisions

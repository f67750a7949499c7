"""`Precision` of a parameter, and `PlanExtension`, by which a config key decides precisions in `build_plan`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from zeroamp.planning.fp32_regions import Fp32Regions
from zeroamp.planning.parameter_uses import ParameterUses
from zeroamp.policies.extensions import Extension
from zeroamp.policies.policy import Policy

Compute = Literal["low", "per op", "fp32", "as stored"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Whether one parameter is all-gathered and computed in low precision, and why."""

    is_low: bool
    """Whether it is all-gathered in the mode's low precision, if it is stored in fp32."""
    compute: Compute
    """ "low": in the mode's low precision; "per op": `torch.autocast` decides; "fp32": in an fp32 region; "as
    stored": nothing casts it."""
    reason: str
    communication: torch.dtype | None = None
    """Communication dtype of its gradient, if an override sets it. None: from the other keys of the config."""
    param: torch.dtype | None = None
    """The dtype in which it is all-gathered and unsharded, if `is_low`. None: the mode's low precision."""
    is_overridden: bool = False
    """Whether an override sets the dtype of its all-gather or of its ops."""


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

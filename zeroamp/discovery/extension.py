"""`Discovery`: with `lower_precision_safe_modules` "auto", a run of the model decides which parameters are safe."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from zeroamp.discovery.fake_run import example_arguments
from zeroamp.discovery.traced_parameters import discover_safe_parameters
from zeroamp.planning.mesh import current_device_type
from zeroamp.planning.parameter_uses import ParameterUses
from zeroamp.planning.precisions import PlanExtension, Precision
from zeroamp.planning.safe_parameters import refuse_all_ignored
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.policy import Policy
from zeroamp.policies.safe_modules import DEFAULT_SAFE_MODULES, KEY, resolve_safe_classes, unsafe_owner


class Discovery(PlanExtension):
    """Runs the model once, and decides by it which parameters are safe in low precision."""

    model_may_cast = True

    def safe_precisions(
        self,
        model: nn.Module,
        policy: Policy,
        uses: Sequence[ParameterUses],
        example_inputs: Any,
        device_type: str | None,
    ) -> list[Precision]:
        """Return the precisions of the parameters by a run of the model. Reasons name where the class list differs.

        Raises:
            ConfigError: there are no example inputs, the model cannot be traced, or no parameter is safe.
        """
        if policy.low_dtype is None:
            raise AssertionError("expected a policy of mode autocast, which has a low dtype")
        args, kwargs = example_arguments(model, example_inputs, f'{KEY} "auto"')
        found = discover_safe_parameters(model, args, kwargs, policy.low_dtype, device_type or current_device_type())
        classes = resolve_safe_classes(DEFAULT_SAFE_MODULES, model)
        precisions = []
        for use in uses:
            name = use.fqns[0]
            is_low = name in found.safe
            would_be_low = unsafe_owner(use.named_owners(), classes) is None
            otherwise = "all-gather it in low precision" if would_be_low else "keep it in fp32"
            wrong = f"; the default class list would {otherwise}" if is_low != would_be_low else ""
            reason = f"{found.reasons[name]}{wrong}"
            precisions.append(Precision(is_low=is_low, compute="low" if is_low else "per op", reason=reason))
        if not (found.needs_values or any(precision.is_low for precision in precisions)):
            _refuse_none_safe(model, uses, precisions)
        return precisions


def needs_run(policy: Policy) -> bool:
    """Return whether planning runs the model with this policy."""
    return policy.mode == "autocast" and policy.lower_precision_safe_modules == "auto"


def _refuse_none_safe(model: nn.Module, uses: Sequence[ParameterUses], precisions: Sequence[Precision]) -> None:
    refuse_all_ignored(model, uses)
    why = f"{uses[0].fqns[0]} is {precisions[0].reason}." if precisions else "The model has no parameters."
    raise ConfigError(
        f'{KEY} "auto" needs a model with layers that autocast runs in low precision, but finds no parameter of '
        f"{type(model).__name__} that is only ever cast by autocast. {why} Name classes of modules instead, or "
        "switch torch_autocast off."
    )

"""`Discovery`: for `lower_precision_safe_modules` "auto" and `zeroamp.autocast_ops`, a run of the model decides."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from zeroamp.discovery.autocast_ops import casting_in_backward
from zeroamp.discovery.fake_run import example_arguments
from zeroamp.discovery.traced_parameters import SafeParameters, discover_safe_parameters
from zeroamp.hooks.unit_hooks import wrap_forward
from zeroamp.planning.mesh import current_device_type
from zeroamp.planning.parameter_uses import ParameterUses
from zeroamp.planning.safe_parameters import Precision, by_class, refuse_all_ignored, refuse_none_safe
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.extensions import Extension
from zeroamp.policies.policy import Policy
from zeroamp.policies.safe_modules import DEFAULT_SAFE_MODULES, KEY, resolve_safe_classes, unsafe_owner
from zeroamp.wrapping.state import WrapState

logger = logging.getLogger("zeroamp")


class Discovery(Extension):
    """Runs the model once, and decides by it which parameters are safe in low precision."""

    def __init__(self) -> None:
        self._cast_modules: frozenset[str] = frozenset()
        """FQNs of the modules whose own forward runs an op of `zeroamp.autocast_ops`."""

    def safe_precisions(
        self,
        model: nn.Module,
        policy: Policy,
        uses: Sequence[ParameterUses],
        example_inputs: Any,
        device_type: str | None,
    ) -> list[Precision]:
        """Return the precisions of the parameters by a run of the model.

        Raises:
            ConfigError: there are no example inputs, the model cannot be traced, or no parameter is safe.
        """
        found = _trace(model, policy, example_inputs, device_type)
        self._cast_modules = found.cast_modules
        self.model_may_cast = policy.lower_precision_safe_modules == "auto"
        decide = _by_run if self.model_may_cast else partial(_by_class_and_ops, policy.lower_precision_safe_modules)
        precisions = decide(model, found, uses)
        _warn_of_unused_ops(model, policy, found)
        return precisions

    def attach(self, model: nn.Module, state: WrapState) -> None:
        """Wrap the modules whose classes ran `autocast_ops` in the traced run, except those in fp32 regions."""
        plan = state.plan  # autocast is off in an fp32 region
        classes = tuple({type(model.get_submodule(fqn)) for fqn in self._cast_modules})
        for fqn, module in model.named_modules() if classes else ():
            if isinstance(module, classes) and plan.fp32_regions.pattern_of(fqn) is None:
                wrap_forward(module, partial(casting_in_backward, plan.policy.autocast_ops))


def needs_run(policy: Policy) -> bool:
    """Return whether planning runs the model with this policy."""
    is_auto = policy.lower_precision_safe_modules == "auto"
    return policy.mode == "autocast" and (is_auto or bool(policy.autocast_ops))


def _trace(model: nn.Module, policy: Policy, example_inputs: Any, device_type: str | None) -> SafeParameters:
    if policy.low_dtype is None:
        raise AssertionError("expected a policy of mode autocast, which has a low dtype")
    key = f'{KEY} "auto"' if policy.lower_precision_safe_modules == "auto" else "zeroamp.autocast_ops"
    args, kwargs = example_arguments(model, example_inputs, key)
    device_type = device_type or current_device_type()
    return discover_safe_parameters(model, args, kwargs, policy.low_dtype, device_type, policy.autocast_ops)


def _warn_of_unused_ops(model: nn.Module, policy: Policy, found: SafeParameters) -> None:
    """Warn if the config names `autocast_ops` and the traced forward ran none of them."""
    if policy.autocast_ops and not found.cast_modules:
        logger.warning(
            "zeroamp.autocast_ops names %s, but the forward of %s runs none of them on tensors that autocast would "
            "cast: the key has no effect. transformers runs experts by grouped_mm after "
            'model.set_experts_implementation("grouped_mm").',
            *(", ".join(sorted(policy.autocast_ops)), type(model).__name__),
        )


def _by_run(model: nn.Module, found: SafeParameters, uses: Sequence[ParameterUses]) -> list[Precision]:
    """Return the precisions by the run alone. The reasons name where the default classes would decide otherwise."""
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
    if not found.needs_values and not any(precision.is_low for precision in precisions):
        refuse_all_ignored(model, uses)
        why = f"{uses[0].fqns[0]} is {precisions[0].reason}." if precisions else "The model has no parameters."
        raise ConfigError(
            f'{KEY} "auto" needs a model with layers that autocast runs in low precision, but finds no parameter of '
            f"{type(model).__name__} that is only ever cast by autocast. {why} Name classes of modules instead, or "
            "switch torch_autocast off."
        )
    return precisions


def _by_class_and_ops(
    names: Sequence[str], model: nn.Module, found: SafeParameters, uses: Sequence[ParameterUses]
) -> list[Precision]:
    """Return the precisions by the classes `names` of the owners, or because only `autocast_ops` read a parameter."""
    precisions = by_class(model, names, uses)
    for index, (use, precision) in enumerate(zip(uses, precisions, strict=True)):
        why = found.reasons[use.fqns[0]]
        if not precision.is_low and use.fqns[0] in found.by_ops:
            precisions[index] = Precision(is_low=True, compute="low", reason=why)
        elif not precision.is_low and use.parameter.dim() == 3:  # experts: why autocast_ops did not take them
            precisions[index] = replace(precision, reason=f"{precision.reason}; zeroamp.autocast_ops: {why}")
    refuse_none_safe(model, names, uses, precisions)
    return precisions

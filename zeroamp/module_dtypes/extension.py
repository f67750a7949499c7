"""`ModuleDtypes`: the precisions of parameters that `zeroamp.overrides` or `keep_in_fp32_modules` name."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from zeroamp.module_dtypes.kept_in_fp32 import find_fp32_regions
from zeroamp.module_dtypes.overrides import Override, Overrides, find_overrides
from zeroamp.planning.fp32_regions import Fp32Regions
from zeroamp.planning.groups import ParamPlan
from zeroamp.planning.parameter_uses import ParameterUses
from zeroamp.planning.plan import Plan
from zeroamp.planning.precisions import Compute, PlanExtension, Precision
from zeroamp.planning.safe_parameters import fixed_precision
from zeroamp.policies.dtypes import short_name, stored_dtype
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.policy import Policy


class ModuleDtypes(PlanExtension):
    """Gives some modules other dtypes. Also made for a model of transformers that keeps modules in fp32 itself."""

    def __init__(self) -> None:
        self.overrides = Overrides()
        """The policy's overrides, by the modules and parameters to which they apply."""
        self._regions = Fp32Regions()

    def fp32_regions(self, model: nn.Module, policy: Policy) -> Fp32Regions:
        """Return the modules and tensors that stay in fp32.

        Raises:
            ConfigError: a pattern matches nothing, or the same as earlier ones.
        """
        self.overrides = find_overrides(model, policy)
        self._regions = find_fp32_regions(model, policy, self.overrides)
        return self._regions

    def precisions(
        self, model: nn.Module, policy: Policy, uses: Sequence[ParameterUses], precisions: Iterable[Precision]
    ) -> Iterator[Precision]:
        """Yield the precisions, with those in fp32 regions, and those of overrides, changed.

        Raises:
            ConfigError: a pattern of `keep_in_fp32_modules` matches some owners of a tied parameter and not others, or
                a parameter that is stored in a low dtype; or an override contradicts another, an fp32 region, or the
                stored dtype.
        """
        del model
        for use, precision in zip(uses, precisions, strict=True):
            if fixed_precision(use.parameter) is not None:
                yield precision
                continue
            kept = _in_fp32(use, self._regions, policy)
            yield _overridden(kept or precision, use, self._regions, self.overrides, policy)


def overridden(plan: Plan, index: int) -> list[ParamPlan]:
    """Return the parameters to which the override at `index` in the list applies, without 0-D ones."""
    overrides = next(each.overrides for each in plan.extensions if isinstance(each, ModuleDtypes))
    names = ((param, (param.fqn, *param.aliases)) for group in plan.groups for param in group.params)
    found = ((param, [overrides.of(fqn) for fqn in fqns]) for param, fqns in names)
    return [param for param, firsts in found if any(first and first.index == index for first in firsts)]


def _overridden(
    precision: Precision, use: ParameterUses, regions: Fp32Regions, overrides: Overrides, policy: Policy
) -> Precision:
    """Return a parameter's precision, changed by its override. Overrides to fp32 are in `regions` already."""
    found = {fqn: override for fqn in use.fqns if (override := overrides.of(fqn)) is not None}
    if not found:
        return precision
    fqn, override = next(iter(found.items()))
    for other_fqn, other in found.items():
        if other.asked.settings() != override.asked.settings():
            raise ConfigError(
                f"{override} sets {override.asked.settings()} for {fqn}, but {other} sets {other.asked.settings()} for "
                f"{other_fqn}, which is the same parameter. Name all owners of a tied parameter in one override."
            )
    if override.low_dtype is not None:
        _refuse_low(override, fqn, use, regions, overrides)
        is_compute = override.asked.compute is not None or policy.mode != "autocast" or precision.compute == "low"
        precision = replace(precision, is_low=True, compute="low" if is_compute else "per op")
    is_overridden = override.asked.compute is not None or override.asked.param is not None
    reason = f"{override}: {override.asked.settings()}"
    return replace(
        precision,
        communication=override.asked.communication,
        reason=reason if is_overridden else f"{precision.reason}; {reason}",
        is_overridden=is_overridden,
    )


def _refuse_low(
    override: Override, matched: str, use: ParameterUses, regions: Fp32Regions, overrides: Overrides
) -> None:
    """Raise if an override sets a low dtype for a parameter that an fp32 region, another owner or its dtype prevents.

    `matched` is the parameter's FQN that the override matches.
    """
    asks = f"{override} sets {override.asked.settings()} for {matched}"
    for fqn in use.fqns:
        if (source := regions.pattern_of(fqn)) is not None:
            raise ConfigError(f"{asks}, but {source} keeps {fqn} in fp32. Remove it from one of the two.")
        if overrides.of(fqn) is None:
            raise ConfigError(
                f"{asks}, but not for {fqn}, which is the same parameter. Name all owners of a tied parameter, or none."
            )
    if (dtype := stored_dtype(use.parameter)) not in (torch.float32, override.low_dtype):
        raise ConfigError(
            f"{asks}, but the parameter is frozen and stored in {short_name(dtype)}, so it is all-gathered in that "
            "dtype. Cast it before wrap_model, or leave it out of the override."
        )


def _in_fp32(use: ParameterUses, regions: Fp32Regions, policy: Policy) -> Precision | None:
    """Return the precision of a parameter that an fp32 region or a pattern keeps in fp32; None for others."""
    patterns = [regions.pattern_of(fqn) for fqn in use.fqns]
    if not any(patterns):
        return None
    kept, pattern = next((fqn, each) for fqn, each in zip(use.fqns, patterns, strict=True) if each is not None)
    if policy.mode != "autocast" and not all(patterns):
        outside = use.fqns[patterns.index(None)]
        raise ConfigError(
            f"{pattern} keeps {kept} in fp32 but not {outside}, which is the same parameter. In "
            f"mode {policy.mode} each parameter has one dtype: name all owners of a tied parameter, or none."
        )
    if stored_dtype(use.parameter).itemsize < torch.float32.itemsize:
        raise ConfigError(
            f"{pattern} keeps {kept} in fp32, but it is stored in "
            f"{short_name(use.parameter.dtype)}. Call .float() on its module before wrap_model."
        )
    is_named_itself = use.fqns[0] in regions.tensors
    own: Compute = "per op" if policy.mode == "autocast" else "as stored"
    return Precision(
        is_low=False,
        compute=own if is_named_itself or not all(patterns) else "fp32",
        reason=f"kept in fp32: {pattern}",
    )

"""From a model and a `Policy` to a `Plan`: the units, and the dtypes and group of each parameter.

Reads module classes, shapes and names only (for safe modules "auto" it traces the model), so it works on the meta
device and without a process group.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zeroamp.planning.fp32_regions import Fp32Regions, find_fp32_regions
from zeroamp.planning.fsdp_units import plan_units
from zeroamp.planning.group_dtypes import param_dtypes
from zeroamp.planning.groups import REPLICATED, GroupPlan, ParamPlan, group_params
from zeroamp.planning.parameter_uses import ParameterUses, find_uses, innermost_common, refuse_unusable
from zeroamp.planning.run_order import UnitRun, run_order
from zeroamp.planning.safe_parameters import Precision, param_precisions
from zeroamp.policies.auto_wrap import AutoWrapPolicy
from zeroamp.policies.policy import Policy

logger = logging.getLogger("zeroamp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The units, groups and run order of a model, with the policy that they were made from."""

    policy: Policy
    units: tuple[str, ...]
    """FQNs below the root, children before parents; a merged unit is known by its first module's."""
    groups: tuple[GroupPlan, ...]
    run: UnitRun
    """The order in which the units run, as far as the module tree can tell."""
    empty_params: tuple[ParamPlan, ...] = ()
    """Parameters without elements: in no group, since there is nothing to shard and FSDP2 cannot reduce them."""
    replicated: GroupPlan | None = None
    """The 0-D parameters, which FSDP2 cannot shard: every rank holds them whole. None if there are none."""
    merged: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Unit -> the FQNs of its modules, for the units that `reduce_bucket_size` made of several."""

    fp32_regions: Fp32Regions = field(default_factory=Fp32Regions, hash=False)
    """Modules and tensors that stay in fp32 in every mode."""

    @property
    def all_groups(self) -> tuple[GroupPlan, ...]:
        """The groups that FSDP2 shards, then the replicated group if there is one."""
        return self.groups if self.replicated is None else (*self.groups, self.replicated)

    @property
    def params(self) -> tuple[ParamPlan, ...]:
        """All parameters, group by group, the replicated ones last."""
        return tuple(param for group in self.all_groups for param in group.params)

    def modules_of(self, unit: str) -> tuple[str, ...]:
        """Return the FQNs of a unit's modules: itself, unless it is a merged one. "" is the root."""
        return self.merged.get(unit, (unit,))

    def input_dtype(self, module: str) -> torch.dtype | None:
        """Return the dtype to which a unit's module casts its floating-point inputs; None if it does not cast.

        In modes bf16 and fp16 all units cast, as under FSDP2's own policy, except units in fp32 regions.
        """
        is_low = self.policy.mode in ("bf16", "fp16") and self.fp32_regions.pattern_of(module) is None
        return self.policy.low_dtype if is_low else None

    def unit_numels(self) -> dict[str, int]:
        """Return the elements that are all-gathered when a unit runs, of every unit and the root.

        The model-wide group is all-gathered before.
        """
        numels = dict.fromkeys((*self.units, ""), 0)
        for group in self.groups:
            if group.kind != "model-wide":
                numels[group.unit] += group.numel
        return numels


def build_plan(
    model: nn.Module,
    policy: Policy,
    auto_wrap_policy: AutoWrapPolicy = None,
    example_inputs: Any = None,
    device_type: str | None = None,
) -> Plan:
    """Decide units, dtypes and groups.

    Args:
        model: a plain model, on the meta device too.
        policy: from `policy_from_config`.
        auto_wrap_policy: which modules are units, see `zeroamp.policies.find_units`.
        example_inputs: for `lower_precision_safe_modules` "auto": a tuple of positional arguments, a mapping of keyword
            arguments or a tensor. None takes a transformers model's own `dummy_inputs`.
        device_type: where the model will run, for the same; None is this machine's accelerator, else the CPU.

    Raises:
        WrapError: the wrap policy matches nothing, or a parameter cannot be handled.
        ConfigError: a safe module class is unknown, or none of them is in the model; or nothing is what `leaf_modules`
            or `keep_in_fp32_modules` name, or the latter cuts through a tied parameter.
    """
    units, merged = plan_units(model, policy, auto_wrap_policy)
    regions = find_fp32_regions(model, policy)
    uses = find_uses(model, units, merged)
    for use in uses:
        refuse_unusable(use)
    precisions = param_precisions(model, policy, uses, regions, example_inputs, device_type)
    params = list(_plan_params(policy, uses, precisions))
    sharded = [param for param in params if param.numel > 0 and param.shape]
    replicated = tuple(param for param in params if not param.shape)
    plan = Plan(
        policy=policy,
        units=units,
        merged=merged,
        fp32_regions=regions,
        groups=tuple(group_params(sharded, policy)),
        run=run_order(model, units, merged),
        empty_params=tuple(param for param in params if param.numel == 0),
        replicated=GroupPlan(name=REPLICATED, kind="replicated", unit="", params=replicated) if replicated else None,
    )
    _warn_of_large_gathers(plan)
    return plan


def _warn_of_large_gathers(plan: Plan) -> None:
    """Warn where options of the config leave most of the model unsharded at once, in spite of stage 3."""
    policy, total = plan.policy, sum(group.numel for group in plan.groups)
    if policy.stage != 3:
        return
    numels = plan.unit_numels()
    largest = max((numels[unit] for unit in plan.merged), default=0)
    live = min(policy.max_live_parameters, sum(numels[unit] for unit in plan.units))
    for key, numel in (("reduce_bucket_size", largest), ("stage3_max_live_parameters", live)):
        if numel > total / 2:
            logger.warning(
                "zero_optimization.%s leaves %s of %s elements unsharded at once: stage 3 saves little memory. "
                "Leave it out, or lower it.",
                *(key, f"{numel:,}", f"{total:,}"),
            )


def _plan_params(policy: Policy, uses: Iterable[ParameterUses], precisions: Iterable[Precision]) -> Iterator[ParamPlan]:
    for use, precision in zip(uses, precisions, strict=True):
        dtypes, key = param_dtypes(use.parameter, policy, precision)
        unit = innermost_common(use.chains)
        yield ParamPlan(
            fqn=use.fqns[0],
            aliases=tuple(use.fqns[1:]),
            owner_fqns=tuple(use.owners.values()),
            owner_classes=tuple(dict.fromkeys(type(owner).__name__ for owner in use.owners)),
            shape=tuple(use.parameter.shape),
            unit=unit,
            is_inside_inner_units=all((chain[-1] if chain else "") != unit for chain in use.chains),
            dtypes=dtypes,
            group_key=key,
            reason=precision.reason,
        )

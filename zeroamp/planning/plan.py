"""Builds a `Plan` from a model and a `Policy`: the units, and the dtypes and group of each parameter.

Reads module classes, shapes and names only, so it works on the meta device and without a process group. An extension
may also trace the model.
"""

import logging
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zeroamp.planning.fp32_regions import Fp32Regions
from zeroamp.planning.group_dtypes import GroupKey, ParamDtypes, ignored_dtypes, param_dtypes
from zeroamp.planning.groups import IGNORED, REPLICATED, GroupPlan, ParamPlan, group_params
from zeroamp.planning.mesh import local_part
from zeroamp.planning.mesh_axes import is_expert
from zeroamp.planning.parameter_uses import ParameterUses, find_uses, innermost_common, refuse_unready, refuse_unusable
from zeroamp.planning.precisions import PlanExtension, Precision
from zeroamp.planning.run_order import UnitRun, run_order, tree_order
from zeroamp.planning.safe_parameters import param_precisions
from zeroamp.planning.shard_sizes import may_shard_any_dim
from zeroamp.policies.auto_wrap import AutoWrapPolicy, OwnUnits, find_own_units, find_units
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import WrapError
from zeroamp.policies.extensions import Extension, extensions_of, of_class
from zeroamp.policies.policy import ConfigLike, Policy, as_policy

logger = logging.getLogger("zeroamp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The units, groups and run order of a model, and the policy from which they were made."""

    policy: Policy
    units: tuple[str, ...]
    """FQNs of the units below the root, children before parents."""
    groups: tuple[GroupPlan, ...]
    """The groups that FSDP2 shards."""
    run: UnitRun
    """The order in which the units run, predicted from the module tree."""
    empty_params: tuple[ParamPlan, ...] = ()
    """Parameters without elements. They are in no group: FSDP2 cannot reduce them, and there is nothing to shard."""
    replicated: GroupPlan | None = None
    """The 0-D parameters, which FSDP2 cannot shard. They are whole on each rank. None if there are none."""
    ignored: tuple[GroupPlan, ...] = ()
    """The parameters of `ignored_params`, by dtype. They are whole on each rank, and the caller reduces them."""
    own_units: OwnUnits = field(default_factory=OwnUnits)
    """The embeddings and heads among `units`, which are units without a wrap policy that names them."""

    ending: tuple[str, ...] = ()
    """Names of the groups, in the order in which FSDP2's callback at the end of a backward handles them."""

    fp32_regions: Fp32Regions = field(default_factory=Fp32Regions, hash=False)
    """Modules and tensors that stay in fp32 in every mode."""

    extensions: tuple[Extension, ...] = field(default=(), hash=False, compare=False)
    """What keys of the policy add to a run from outside of the core."""

    @property
    def all_groups(self) -> tuple[GroupPlan, ...]:
        """The groups that FSDP2 shards, then the replicated group if there is one, then the ignored groups."""
        return (*self.groups, *((self.replicated,) if self.replicated is not None else ()), *self.ignored)

    @property
    def params(self) -> tuple[ParamPlan, ...]:
        """All parameters by group, in the order of `all_groups`."""
        return tuple(param for group in self.all_groups for param in group.params)

    @property
    def low_share(self) -> float:
        """The part of the trainable elements that is all-gathered in the mode's low precision, 0 to 1."""
        trained = [param for param in self.params if param.is_trainable]
        low = sum(param.numel for param in trained if param.group_key.param == self.policy.low_dtype)
        return low / max(1, sum(param.numel for param in trained))

    def describe_low_share(self) -> str:
        """Return the low share as text; empty in mode fp32."""
        low, trained = self.policy.low_dtype, [param for param in self.params if param.is_trainable]
        if low is None:
            return ""
        text = f"{self.low_share:.1%} of the trainable elements in {short_name(low)}"
        apart = [param for param in trained if param.has_own_gather_dtype]
        for dtype in dict.fromkeys(param.dtypes.param for param in apart):
            share = sum(p.numel for p in apart if p.dtypes.param == dtype) / max(1, sum(p.numel for p in trained))
            text += f", {share:.1%} all-gathered in {short_name(dtype)}"
        return text

    @property
    def ignored_fqns(self) -> frozenset[str]:
        """All FQNs of the ignored parameters."""
        params = (param for group in self.ignored for param in group.params)
        return frozenset(fqn for param in params for fqn in (param.fqn, *param.aliases))

    def input_dtype(self, unit: str) -> torch.dtype | None:
        """Return the dtype to which a unit casts its floating-point inputs; None if it does not cast. "" is the root.

        In modes bf16 and fp16 units cast, as under FSDP2's own policy. Units in fp32 regions do not cast.
        """
        is_low = self.policy.mode in ("bf16", "fp16") and self.fp32_regions.pattern_of(unit) is None
        return self.policy.low_dtype if is_low else None

    def unit_numels(self) -> dict[str, int]:
        """Return {unit: the number of elements that are all-gathered when it runs}; "" is the root.

        The model-wide group does not count: it is all-gathered before.
        """
        numels = dict.fromkeys((*self.units, ""), 0)
        for group in self.groups:
            if group.kind != "model-wide":
                numels[group.unit] += group.numel
        return numels


def build_plan(
    model: nn.Module,
    policy: Policy | ConfigLike,
    auto_wrap_policy: AutoWrapPolicy = None,
    example_inputs: Any = None,
    device_type: str | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> Plan:
    """Return the plan of a model: its units, and the dtypes and group of each parameter. Does not change the model.

    Args:
        model: a plain model, on any device, the meta device included.
        policy: see `wrap_model`.
        auto_wrap_policy: the modules that become units, see `zeroamp.policies.find_units`.
        example_inputs: for `lower_precision_safe_modules` "auto": a tuple of positional arguments, a mapping of keyword
            arguments, or a tensor. None stands for a transformers model's `dummy_inputs`.
        device_type: where the model will run, also for "auto". None: this machine's accelerator, or the CPU without
            one.
        ignored_params: parameters of the model that are not sharded, see `wrap_model`.

    Raises:
        WrapError: the wrap policy matches nothing, a parameter cannot be handled, or an ignored parameter is not one of
            the model's.
        ConfigError: the config is not valid; a safe module class is unknown, or the model has none of them;
            `leaf_modules`, `optional_units`, `keep_in_fp32_modules` or `overrides` match nothing; one of the last two
            matches some owners of a tied parameter and not others; or a model that must be traced cannot be traced.
    """
    policy = as_policy(policy)
    optional: set[nn.Module] = set()
    if policy.optional_units:
        from zeroamp.module_dtypes.optional_units import find_optional

        optional = find_optional(model, policy)
    units = _find_units(model, policy, auto_wrap_policy, optional)
    ignored_params = _listed(ignored_params)
    own_units = OwnUnits()
    if policy.stage == 3 and policy.own_units and units:
        inside_units = {inner for unit in units for inner in model.get_submodule(unit).modules()}
        excluded = [*ignored_params, *(parameter for module in optional for parameter in module.parameters())]
        own_units = find_own_units(model, inside_units, policy.param_persistence_threshold, excluded)
        units = (*units, *own_units)
    extensions = extensions_of(policy, model)
    regions = Fp32Regions()
    plan_extensions = of_class(extensions, PlanExtension)
    for extension in plan_extensions:
        regions = extension.fp32_regions(model, policy) or regions
    uses, ignored = _without_ignored(find_uses(model, units), ignored_params)
    for use in uses:
        refuse_unusable(use)
    precisions: Iterable[Precision] = param_precisions(
        model, policy, uses, plan_extensions, example_inputs, device_type
    )
    for extension in plan_extensions:
        precisions = extension.precisions(model, policy, uses, precisions)
    params = [
        _param_plan(use, policy, *param_dtypes(use.parameter, policy, precision), precision.reason)
        for use, precision in zip(uses, precisions, strict=True)
    ]
    sharded = [param for param in params if param.numel > 0 and param.shape]
    replicated = tuple(param for param in params if not param.shape)
    groups = tuple(group_params(sharded, policy, with_root=bool(own_units)))
    plan = Plan(
        policy=policy,
        units=units,
        fp32_regions=regions,
        extensions=extensions,
        own_units=own_units,
        groups=groups,
        run=run_order(model, units, own_units.lookups),
        ending=tree_order(model, groups),
        empty_params=tuple(param for param in params if param.numel == 0),
        ignored=tuple(_ignored_groups(ignored, policy)),
        replicated=GroupPlan(name=REPLICATED, kind="replicated", unit="", params=replicated) if replicated else None,
    )
    _warn_of_large_gathers(plan)
    return plan


def _find_units(
    model: nn.Module, policy: Policy, auto_wrap_policy: AutoWrapPolicy, optional: Container[nn.Module]
) -> tuple[str, ...]:
    found = find_units(model, auto_wrap_policy, leaf_modules=policy.leaf_modules)
    units = [unit for unit in found if model.get_submodule(unit) not in optional]
    if policy.stage == 3 and not units:
        logger.warning(
            "%s has no units below its root: at stage 3 all of its parameters are unsharded at once. Name its blocks "
            "with auto_wrap_policy to save memory.",
            type(model).__name__,
        )
    return tuple(units)


def _warn_of_large_gathers(plan: Plan) -> None:
    """Warn if the config leaves more than half of the model unsharded at once at stage 3."""
    policy, total = plan.policy, sum(group.numel for group in plan.groups)
    numels = plan.unit_numels()
    live = min(policy.max_live_parameters, sum(numels[unit] for unit in plan.units))
    if policy.stage == 3 and live > total / 2:
        logger.warning(
            "zero_optimization.stage3_max_live_parameters leaves %s of %s elements unsharded at once: stage 3 saves "
            "little memory. Leave it out, or lower it.",
            *(f"{live:,}", f"{total:,}"),
        )


def _listed(ignored_params: Iterable[nn.Parameter] | None) -> list[nn.Parameter]:
    if isinstance(ignored_params, torch.Tensor):
        raise WrapError(
            "ignored_params must be a set or list of parameters, but is a "
            f"{type(ignored_params).__name__} of shape {tuple(ignored_params.shape)}. Put it in a set."
        )
    return list(ignored_params or ())


def _without_ignored(
    uses: list[ParameterUses], ignored_params: Iterable[nn.Parameter]
) -> tuple[list[ParameterUses], list[ParameterUses]]:
    """Return the uses of the parameters to plan, and those of `ignored_params`."""
    asked = {id(parameter): parameter for parameter in ignored_params}
    known = {id(use.parameter) for use in uses}
    others = [parameter for key, parameter in asked.items() if key not in known]
    shapes = [f" of shape {tuple(each.shape)}" if isinstance(each, torch.Tensor) else "" for each in others]
    if others:
        found = min(f"{type(each).__name__}{shape}" for each, shape in zip(others, shapes, strict=True))
        raise WrapError(
            f"ignored_params contains a {found} that is not a parameter of the model. Pass parameters that "
            "model.parameters() yields, not names."
        )
    kept = [use for use in uses if id(use.parameter) not in asked]
    ignored = [use for use in uses if id(use.parameter) in asked]
    for use in ignored:
        refuse_unready(use)
    return kept, ignored


def _ignored_groups(uses: Iterable[ParameterUses], policy: Policy) -> Iterator[GroupPlan]:
    by_dtype: dict[torch.dtype, list[ParamPlan]] = {}
    for use in uses:
        reason = "ignored_params: whole on each rank, and its gradient is not reduced"
        param = _param_plan(use, policy, *ignored_dtypes(use.parameter, policy), reason)
        by_dtype.setdefault(use.parameter.dtype, []).append(param)
    for dtype, params in by_dtype.items():
        yield GroupPlan(name=f"{IGNORED}:{short_name(dtype)}", kind="ignored", unit="", params=tuple(params))


def _param_plan(use: ParameterUses, policy: Policy, dtypes: ParamDtypes, key: GroupKey, reason: str) -> ParamPlan:
    unit = innermost_common(use.chains)
    return ParamPlan(
        fqn=use.fqns[0],
        aliases=tuple(use.fqns[1:]),
        owner_fqns=tuple(use.owners.values()),
        owner_classes=tuple(dict.fromkeys(type(owner).__name__ for owner in use.owners)),
        shape=tuple(local_part(use.parameter.detach()).shape),
        is_expert=is_expert(use.parameter),
        any_dim=not key.is_ignored and may_shard_any_dim(use.parameter, policy),
        unit=unit,
        is_inside_inner_units=all((chain[-1] if chain else "") != unit for chain in use.chains),
        dtypes=dtypes,
        group_key=key,
        reason=reason,
    )

"""From a model and a `Policy` to a `Plan`: which parameter travels in which dtype, and in which group.

Pure: reads module classes, shapes and names only, so it works on the meta device and without a process group.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from zeroamp.ownership import ParameterUses, find_uses, innermost_common, refuse_unusable
from zeroamp.policies.accumulation import accumulation_dtype
from zeroamp.policies.dtypes import LOW_DTYPES, short_name
from zeroamp.policies.errors import ConfigError, describe
from zeroamp.policies.policy import Policy
from zeroamp.policies.safe_modules import KEY, resolve_safe_classes, unsafe_owner
from zeroamp.policies.wrap import AutoWrapPolicy
from zeroamp.run_order import UnitRun, run_order
from zeroamp.units import plan_units

GroupKind = Literal["unit", "typed", "model-wide"]
GroupKey = tuple[torch.dtype, torch.dtype, torch.dtype]
"""(storage, gather, wire): parameters of one unit with equal keys are one group. A frozen parameter has the wire that
it would have if it were trained, so that freezing a bias does not split a group; one that is stored in another dtype
than fp32 cannot be trained, and whether it is safe splits nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamDtypes:
    """The seven dtypes of one parameter."""

    storage: torch.dtype
    gather: torch.dtype
    compute: str
    """ "bf16" and so on where it is fixed; "per op" where `torch.autocast` decides at each op."""
    gradient: torch.dtype | None
    """Of the raw, unsharded gradient. This and the next three are None for a frozen parameter."""
    wire: torch.dtype | None
    accumulate: torch.dtype | None
    optimizer: torch.dtype | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamPlan:
    """One parameter."""

    fqn: str
    aliases: tuple[str, ...]
    """Other names of the same tensor (tied weights)."""
    owner_fqns: tuple[str, ...]
    """Modules that own it directly, each once."""
    owner_classes: tuple[str, ...]
    """Names of their classes, each once."""
    shape: tuple[int, ...]
    unit: str
    """FQN of the innermost unit that contains all owners; "" is the root."""
    dtypes: ParamDtypes
    group_key: GroupKey
    is_inside_inner_units: bool
    """Whether every use lies inside units nested in `unit`, where FSDP2's walk from `unit` does not look."""
    reason: str
    """Why these dtypes: which class matched, or which owner prevented it."""

    @property
    def numel(self) -> int:
        """Elements, unsharded."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """Parameters that are gathered in one collective and reduced in one."""

    name: str
    kind: GroupKind
    """"unit": FSDP2's own group of a unit. "typed": a further group of that unit, for another dtype or for parameters
    that inner units share. "model-wide": small fp32 parameters of all units, gathered once per step at the root."""
    unit: str
    params: tuple[ParamPlan, ...]

    @property
    def dtypes(self) -> ParamDtypes:
        """The dtypes that its parameters share (the trainable ones, where some are frozen)."""
        return next((p.dtypes for p in self.params if p.dtypes.gradient is not None), self.params[0].dtypes)

    @property
    def gather(self) -> torch.dtype:
        """The dtype on the wire of its all-gather."""
        return self.params[0].group_key[1]

    @property
    def wire(self) -> torch.dtype:
        """The dtype on the wire of its reduction, also where all its parameters are frozen: they may be unfrozen."""
        return self.params[0].group_key[2]

    @property
    def numel(self) -> int:
        """Elements, unsharded."""
        return sum(param.numel for param in self.params)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What `wrap_model` will do."""

    policy: Policy
    units: tuple[str, ...]
    """FQNs below the root, children before parents; a merged unit is known by its first module's."""
    groups: tuple[GroupPlan, ...]
    run: UnitRun
    """The order in which the units run, as far as the module tree can tell."""
    empty_params: tuple[ParamPlan, ...] = ()
    """Parameters without elements: in no group, since there is nothing to shard and FSDP2 cannot reduce them."""
    merged: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Unit -> the FQNs of its modules, for the units that `reduce_bucket_size` made of several."""

    @property
    def params(self) -> tuple[ParamPlan, ...]:
        """All parameters, group by group."""
        return tuple(param for group in self.groups for param in group.params)

    def modules_of(self, unit: str) -> tuple[str, ...]:
        """Return the FQNs of a unit's modules: itself, unless it is a merged one. "" is the root."""
        return self.merged.get(unit, (unit,))

    def numel_of(self, unit: str) -> int:
        """Return the elements that are gathered when a unit runs; the model-wide group is gathered before."""
        return sum(group.numel for group in self.groups if group.unit == unit and group.kind != "model-wide")


def build_plan(model: nn.Module, policy: Policy, auto_wrap_policy: AutoWrapPolicy = None) -> Plan:
    """Decide units, dtypes and groups.

    Raises:
        WrapError: the wrap policy matches nothing, or a parameter cannot be handled.
        ConfigError: a safe module class is unknown, or none of them is in the model; or no module is what
            `leaf_modules` names.
    """
    units, merged = plan_units(model, policy, auto_wrap_policy)
    params = _plan_params(model, policy, find_uses(model, units, merged))
    return Plan(
        policy=policy,
        units=units,
        merged=merged,
        groups=tuple(_group((param for param in params if param.numel > 0), policy)),
        run=run_order(model, units, merged),
        empty_params=tuple(param for param in params if param.numel == 0),
    )


def _plan_params(model: nn.Module, policy: Policy, uses: Iterable[ParameterUses]) -> list[ParamPlan]:
    safe_classes = resolve_safe_classes(policy.lower_precision_safe_modules, model)
    params = []
    for use in uses:
        refuse_unusable(use)
        low, reason = _is_low(use, policy, safe_classes)
        params.append(
            ParamPlan(
                fqn=use.fqns[0],
                aliases=tuple(use.fqns[1:]),
                owner_fqns=tuple(use.owners.values()),
                owner_classes=tuple(dict.fromkeys(type(owner).__name__ for owner in use.owners)),
                shape=tuple(use.parameter.shape),
                unit=(unit := innermost_common(use.chains)),
                is_inside_inner_units=all((chain[-1] if chain else "") != unit for chain in use.chains),
                dtypes=(dtypes := _dtypes(use.parameter, policy, low)),
                group_key=(dtypes.storage, dtypes.gather, _wire_dtype(policy, low and dtypes.storage == torch.float32)),
                reason=reason,
            )
        )
    if safe_classes and not any(p.dtypes.gather in LOW_DTYPES for p in params):
        raise ConfigError(
            describe(
                KEY,
                f"{', '.join(policy.lower_precision_safe_modules)}, which own no parameter of {type(model).__name__}",
                "classes that the model contains",
                "Name the classes of its large layers, or switch torch_autocast off: as it is, all would stay fp32.",
            )
        )
    return params


def _is_low(use: ParameterUses, policy: Policy, safe_classes: tuple[type[nn.Module], ...]) -> tuple[bool, str]:
    if not use.parameter.dtype.is_floating_point:
        return False, f"{short_name(use.parameter.dtype)} is no floating-point dtype"
    if policy.mode == "autocast":
        culprit = unsafe_owner(use.named_owners(), safe_classes)
        if culprit is None:
            return True, f"safe: owned by {type(next(iter(use.owners))).__name__}"
        tied = f", tied with {', '.join(use.fqns[1:])}" if len(use.owners) > 1 else ""
        return False, f"not safe: owned by {type(culprit).__name__} ({use.owners[culprit] or 'the root'}){tied}"
    return policy.mode != "fp32", f"mode {policy.mode}"


def _dtypes(parameter: nn.Parameter, policy: Policy, low: bool) -> ParamDtypes:
    storage = parameter.dtype
    is_fp32 = storage == torch.float32
    # A parameter that is stored in another dtype than fp32 is frozen: it travels as it is stored, which is smaller.
    gather = policy.gather_dtype if low and is_fp32 else storage
    wire = _wire_dtype(policy, low) if parameter.requires_grad else None
    return ParamDtypes(
        storage=storage,
        gather=gather,
        compute="per op"
        if policy.mode == "autocast" and not low
        else short_name(policy.gather_dtype if low else storage),
        gradient=gather if wire else None,
        wire=wire,
        accumulate=accumulation_dtype(policy) if wire else None,
        optimizer=storage if wire else None,
    )


def _wire_dtype(policy: Policy, low: bool) -> torch.dtype:
    if not low and policy.mode != "fp32":
        return torch.float32
    if policy.stage == 0 and policy.reduce_accumulate_dtype == "fp32":
        return torch.float32  # an all-reduce sums on the way, so an fp32 sum needs fp32 on the wire
    return policy.wire_dtype


def _group(params: Iterable[ParamPlan], policy: Policy) -> list[GroupPlan]:
    """One group per (unit, dtype key), small fp32 parameters of low-precision units apart, in one model-wide group."""
    by_unit: dict[str, dict[tuple[GroupKey, bool], list[ParamPlan]]] = {}
    for param in params:
        kind = param.group_key, param.is_inside_inner_units
        by_unit.setdefault(param.unit, {}).setdefault(kind, []).append(param)
    groups: list[GroupPlan] = []
    small: list[ParamPlan] = []
    for unit, by_kind in by_unit.items():
        if own_kinds := [kind for kind in by_kind if not kind[1]]:
            main = max(own_kinds, key=lambda kind: (kind[0][1] in LOW_DTYPES, sum(p.numel for p in by_kind[kind])))
            groups.append(GroupPlan(name=unit or "root", kind="unit", unit=unit, params=tuple(by_kind.pop(main))))
        for (key, is_shared), members in by_kind.items():
            threshold = policy.param_persistence_threshold if key[:2] == (torch.float32, torch.float32) else 0
            small += [p for p in members if p.numel < threshold]
            if large := tuple(p for p in members if p.numel >= threshold):
                name = _typed_name(unit, key, is_shared)
                groups.append(GroupPlan(name=name, kind="typed", unit=unit, params=large))
    if small:
        groups.append(GroupPlan(name="model-wide:fp32", kind="model-wide", unit="", params=tuple(small)))
    return groups


def _typed_name(unit: str, key: GroupKey, is_shared: bool) -> str:
    storage, gather, _wire = key
    stored = "" if storage == torch.float32 else f" (stored {short_name(storage)})"
    return f"{unit or 'root'}:{short_name(gather)}{stored}{' (shared by inner units)' if is_shared else ''}"

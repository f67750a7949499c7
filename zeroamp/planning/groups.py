"""Which parameters are communicated together: a group per unit and dtypes, and one for all units' small fp32 ones.

[Note: The model-wide group]
A group per unit for a few norm weights would cost a collective each, so the small fp32 parameters of all units are one
group, unsharded by the root's forward and reduced when its backward ends. The root's own further fp32 parameters, an
embedding say, are unsharded and reduced at the same moments; they join the group whatever their size, which saves
collectives. The whole group stays unsharded until the last backward of an optimizer step. On an accelerator, the flat
buffer of its all-gather is released when the first unit has been unsharded. Neither raises the memory peak.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch

from zeroamp.planning.group_dtypes import GroupKey, ParamDtypes
from zeroamp.policies.dtypes import LOW_DTYPES, short_name
from zeroamp.policies.policy import Policy

GroupKind = Literal["unit", "typed", "model-wide", "replicated"]
REPLICATED = "replicated"
"""Name of the group of 0-D parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamPlan:
    """Where one parameter is used, which dtypes it has there, and why."""

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
    def is_trainable(self) -> bool:
        """Whether it has a gradient."""
        return self.dtypes.gradient is not None

    @property
    def numel(self) -> int:
        """Elements, unsharded."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """Parameters that are all-gathered in one collective and reduced in one."""

    name: str
    kind: GroupKind
    """"unit": FSDP2's own group of a unit. "typed": a further group of that unit, for another dtype or for parameters
    that inner units share. "model-wide": small fp32 parameters of all units, and with them the root's that would else
    be a typed group, unsharded once per optimizer step at the root. "replicated": 0-D parameters, which every rank
    holds whole; not one of `Plan.groups`."""
    unit: str
    params: tuple[ParamPlan, ...]

    @property
    def key(self) -> GroupKey:
        """The dtypes that its parameters share, also where all of them are frozen: they may be unfrozen."""
        return self.params[0].group_key

    @property
    def dtypes(self) -> ParamDtypes:
        """The dtypes of its first trainable parameter; of the first, where all are frozen."""
        return next((param.dtypes for param in self.params if param.is_trainable), self.params[0].dtypes)

    @property
    def is_trainable(self) -> bool:
        """Whether any of its parameters has a gradient."""
        return any(param.is_trainable for param in self.params)

    @property
    def numel(self) -> int:
        """Elements, unsharded."""
        return sum(param.numel for param in self.params)


def group_params(params: Iterable[ParamPlan], policy: Policy) -> list[GroupPlan]:
    """Return a group per (unit, dtype key), and one for the whole model, see [Note: The model-wide group]."""
    by_unit: dict[str, dict[tuple[GroupKey, bool], list[ParamPlan]]] = {}
    for param in params:
        kind = param.group_key, param.is_inside_inner_units
        by_unit.setdefault(param.unit, {}).setdefault(kind, []).append(param)
    groups: list[GroupPlan] = []
    small: list[ParamPlan] = []
    for unit, by_kind in by_unit.items():
        if own_kinds := [kind for kind in by_kind if not kind[1]]:
            main = max(own_kinds, key=lambda kind: (kind[0].param in LOW_DTYPES, sum(p.numel for p in by_kind[kind])))
            groups.append(GroupPlan(name=unit or "root", kind="unit", unit=unit, params=tuple(by_kind.pop(main))))
        for (key, is_shared), members in by_kind.items():
            threshold = policy.param_persistence_threshold if _is_fp32(key) else 0
            small += [p for p in members if p.numel < threshold]
            if large := tuple(p for p in members if p.numel >= threshold):
                name = _typed_name(unit, key, is_shared)
                groups.append(GroupPlan(name=name, kind="typed", unit=unit, params=large))
    return _with_model_wide(groups, small) if small else groups


def _with_model_wide(groups: list[GroupPlan], small: list[ParamPlan]) -> list[GroupPlan]:
    """Make one group of `small` and of the root's typed fp32 groups, and put it last."""
    at_root = [g for g in groups if (g.kind, g.unit) == ("typed", "") and _is_fp32(g.key)]
    params = (*chain.from_iterable(group.params for group in at_root), *small)
    model_wide = GroupPlan(name="model-wide:fp32", kind="model-wide", unit="", params=params)
    return [*(group for group in groups if group not in at_root), model_wide]


def _is_fp32(key: GroupKey) -> bool:
    return key.stored == key.param == torch.float32


def _typed_name(unit: str, key: GroupKey, is_shared: bool) -> str:
    stored = "" if key.stored == torch.float32 else f" (stored {short_name(key.stored)})"
    return f"{unit or 'root'}:{short_name(key.param)}{stored}{' (shared by inner units)' if is_shared else ''}"

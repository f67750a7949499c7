"""Which parameters travel together: a group per unit and dtype key, and one for the small fp32 ones of all units.

[Note: The model-wide group]
A group per unit for a few norm weights would cost a collective each, so the small fp32 parameters of all units are one
group, gathered by the root's forward and reduced when its backward ends. The root's own further fp32 parameters, an
embedding say, are gathered and reduced at the same moments; they join it whatever their size, which saves collectives.
Like the small ones they then stay whole until the last backward of a window, not only until that of each micro-batch,
and on an accelerator the flat buffer that they were gathered into stays until the first unit was gathered: both at
moments when memory is not at its peak.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch

from zeroamp.policies.dtypes import LOW_DTYPES, short_name
from zeroamp.policies.policy import Policy

_FP32 = (torch.float32, torch.float32)  # stored and gathered: the first two of a group's key
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
    that inner units share. "model-wide": small fp32 parameters of all units, and with them the root's that would else
    be a typed group, gathered once per step at the root."""
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
            main = max(own_kinds, key=lambda kind: (kind[0][1] in LOW_DTYPES, sum(p.numel for p in by_kind[kind])))
            groups.append(GroupPlan(name=unit or "root", kind="unit", unit=unit, params=tuple(by_kind.pop(main))))
        for (key, is_shared), members in by_kind.items():
            threshold = policy.param_persistence_threshold if key[:2] == _FP32 else 0
            small += [p for p in members if p.numel < threshold]
            if large := tuple(p for p in members if p.numel >= threshold):
                name = _typed_name(unit, key, is_shared)
                groups.append(GroupPlan(name=name, kind="typed", unit=unit, params=large))
    return _with_model_wide(groups, small) if small else groups


def _with_model_wide(groups: list[GroupPlan], small: list[ParamPlan]) -> list[GroupPlan]:
    """Make one group of `small` and of the root's typed fp32 groups, and put it last."""
    at_root = [g for g in groups if (g.kind, g.unit) == ("typed", "") and g.params[0].group_key[:2] == _FP32]
    params = (*chain.from_iterable(group.params for group in at_root), *small)
    model_wide = GroupPlan(name="model-wide:fp32", kind="model-wide", unit="", params=params)
    return [*(group for group in groups if group not in at_root), model_wide]


def _typed_name(unit: str, key: GroupKey, is_shared: bool) -> str:
    storage, gather, _wire = key
    stored = "" if storage == torch.float32 else f" (stored {short_name(storage)})"
    return f"{unit or 'root'}:{short_name(gather)}{stored}{' (shared by inner units)' if is_shared else ''}"

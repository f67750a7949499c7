"""Forms parameter groups: one per unit and combination of dtypes, and one for the small fp32 parameters of all units.

[Note: The model-wide group]
A group per unit for a few norm weights would cost each unit a collective. So the small fp32 parameters of all units
form one group. It is unsharded in the root's forward and reduced when the root's backward ends. The root's own further
fp32 parameters, such as an embedding, are unsharded and reduced at the same times. They join the group whatever their
size, which saves collectives. If the head is a unit of its own, the root may own fp32 parameters only: all of them
join. The whole group stays unsharded until the last backward of an optimizer step. On an accelerator, the flat buffer
of its all-gather is released when the first unit has been unsharded. Neither raises the peak of memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch

from zeroamp.planning.group_dtypes import GroupKey, ParamDtypes, communication_dtype
from zeroamp.planning.shard_sizes import shard_dim
from zeroamp.policies.dtypes import LOW_DTYPES, short_name
from zeroamp.policies.policy import Policy

GroupKind = Literal["unit", "typed", "model-wide", "replicated", "ignored"]
REPLICATED = "replicated"
"""Name of the group of 0-D parameters."""
IGNORED = "ignored"
"""Name of the groups of `ignored_params`, one per dtype: "ignored:fp32"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamPlan:
    """One parameter: its names, owners, shape, unit and dtypes, and the reason for the dtypes."""

    fqn: str
    aliases: tuple[str, ...]
    """Other FQNs of the same tensor (tied weights)."""
    owner_fqns: tuple[str, ...]
    """FQNs of the modules that own it directly, each module once."""
    owner_classes: tuple[str, ...]
    """Names of the owners' classes, each once."""
    shape: tuple[int, ...]
    """The shape that FSDP2 shards. For a DTensor (tensor or expert parallelism) that of this rank's part."""
    unit: str
    """FQN of the innermost unit that contains all owners; "" is the root."""
    dtypes: ParamDtypes
    group_key: GroupKey
    any_dim: bool
    """Whether another dimension than 0 may be sharded: see `zeroamp.planning.shard_sizes`."""
    is_inside_inner_units: bool
    """Whether all owners are inside units that are nested in `unit`. FSDP2's walk from `unit` does not reach them."""
    is_expert: bool = False
    """Whether it is distributed over an axis of expert parallelism before FSDP2 shards it."""
    reason: str
    """The reason for the dtypes: the class that matched, or the owner that prevents low precision."""

    def shard_dim(self, num_shards: int | None) -> int:
        """Return the dimension that is sharded over `num_shards` ranks; 0 if the number is None."""
        return shard_dim(self.shape, num_shards, any_dim=self.any_dim)

    @property
    def has_own_gather_dtype(self) -> bool:
        """Whether it is all-gathered in another dtype than the `param` of its group, which is that of its gradient."""
        return self.dtypes.param != self.group_key.param

    @property
    def is_trainable(self) -> bool:
        """Whether the parameter has a gradient."""
        return self.dtypes.gradient is not None

    @property
    def numel(self) -> int:
        """The number of elements of the unsharded parameter."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """A parameter group: parameters that are all-gathered in one collective and reduced in one."""

    name: str
    kind: GroupKind
    """"unit": FSDP2's own group of a unit. "typed": a further group of that unit, for another dtype, for experts, or
    for parameters that inner units share. "model-wide": see [Note: The model-wide group]; one per communication dtype.
    "replicated": 0-D parameters, which are whole on each rank. "ignored": those of `ignored_params`, which zeroamp does
    not change. `Plan.groups` contains neither of the last two."""
    unit: str
    """FQN of the unit; "" is the root."""
    params: tuple[ParamPlan, ...]

    @property
    def key(self) -> GroupKey:
        """The dtypes that the group's parameters share. Frozen parameters have one too: they may be unfrozen."""
        return self.params[0].group_key

    @property
    def dtypes(self) -> ParamDtypes:
        """The dtypes of the group's first trainable parameter. If all are frozen, those of the first parameter."""
        return next((param.dtypes for param in self.params if param.is_trainable), self.params[0].dtypes)

    @property
    def all_gather_dtype(self) -> torch.dtype:
        """The dtype of its all-gather: that of its unsharded parameters, or uint8 (bytes) where they have several."""
        dtypes = {param.dtypes.param for param in self.params}
        return dtypes.pop() if len(dtypes) == 1 else torch.uint8

    @property
    def is_expert(self) -> bool:
        """Whether the parameters are distributed over an axis of expert parallelism. FSDP2 then gets another mesh."""
        return self.params[0].is_expert

    @property
    def is_trainable(self) -> bool:
        """Whether any of the group's parameters has a gradient."""
        return any(param.is_trainable for param in self.params)

    @property
    def numel(self) -> int:
        """The number of elements of the unsharded group."""
        return sum(param.numel for param in self.params)


def group_params(params: Iterable[ParamPlan], policy: Policy, *, with_root: bool = False) -> list[GroupPlan]:
    """Return the groups: one per unit and dtype key, and those of [Note: The model-wide group].

    `with_root`: whether the root's own group joins the model-wide group too, if it is fp32.
    """
    by_unit: dict[str, dict[tuple[GroupKey, bool, bool], list[ParamPlan]]] = {}
    for param in params:
        kind = param.group_key, param.is_inside_inner_units, param.is_expert
        by_unit.setdefault(param.unit, {}).setdefault(kind, []).append(param)
    groups: list[GroupPlan] = []
    small: list[ParamPlan] = []
    for unit, by_kind in by_unit.items():
        if own_kinds := [kind for kind in by_kind if not kind[1]]:
            sizes = {kind: sum(p.numel for p in by_kind[kind]) for kind in own_kinds}
            main = max(own_kinds, key=lambda kind: (not kind[2], kind[0].param in LOW_DTYPES, sizes[kind]))
            groups.append(GroupPlan(name=unit or "root", kind="unit", unit=unit, params=tuple(by_kind.pop(main))))
        for (key, is_shared, is_expert), members in by_kind.items():
            threshold = policy.param_persistence_threshold if _is_fp32(key) and not is_expert else 0
            small += [p for p in members if p.numel < threshold]
            if large := tuple(p for p in members if p.numel >= threshold):
                which = f"{' (experts)' if is_expert else ''}{' (shared by inner units)' if is_shared else ''}"
                name = f"{unit or 'root'}:{_key_name(key, policy)}{which}"
                groups.append(GroupPlan(name=name, kind="typed", unit=unit, params=large))
    joining: tuple[GroupKind, ...] = ("unit", "typed") if with_root else ("typed",)
    for key in dict.fromkeys(param.group_key for param in small):
        own = [param for param in small if param.group_key == key]
        groups = _with_model_wide(groups, key, own, policy, joining)
    return groups


def _with_model_wide(
    groups: list[GroupPlan], key: GroupKey, small: list[ParamPlan], policy: Policy, joining: tuple[GroupKind, ...]
) -> list[GroupPlan]:
    """Return `groups` with one more, last: `small`, joined with the root's groups of this key and of these kinds."""
    at_root = [group for group in groups if group.unit == "" and group.kind in joining and group.key == key]
    params = (*chain.from_iterable(group.params for group in at_root), *small)
    model_wide = GroupPlan(name=f"model-wide:{_key_name(key, policy)}", kind="model-wide", unit="", params=params)
    return [*(group for group in groups if group not in at_root), model_wide]


def _is_fp32(key: GroupKey) -> bool:
    return key.stored == key.param == torch.float32


def _key_name(key: GroupKey, policy: Policy) -> str:
    """Return the dtypes of a group as text for its name: only those that may differ between groups of a unit."""
    stored = "" if key.stored == torch.float32 else f" (stored {short_name(key.stored)})"
    usual = communication_dtype(policy, is_low=key.param in LOW_DTYPES and key.stored == torch.float32)
    is_usual = key.communication == usual and not key.sends_sums_low
    reduced = "" if is_usual else f" (reduced in {short_name(key.communication)})"
    return f"{short_name(key.param)}{stored}{reduced}"

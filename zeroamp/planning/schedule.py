"""Which groups are resharded after their forward, and which units are prefetched."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zeroamp.planning.groups import GroupKind
from zeroamp.planning.plan import Plan

Kind = Literal["all_gather", "reduction", "last_reduction"]
"""A "last_reduction" is a reduction in the last micro-batch of an optimizer step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Calls per group name in one optimizer step, whatever the number of ranks."""

    all_gathers: Mapping[str, int]
    reductions: Mapping[str, int]
    last_reductions: Mapping[str, int]
    """The part of `reductions` that runs in the last micro-batch."""
    order: Sequence[tuple[Kind, str]]
    """The same calls with their groups' names, in the order in which they are issued."""


def live_units(plan: Plan) -> set[str]:
    """Return the units that stay unsharded between forward and backward: the last ones, up to `max_live_parameters`.

    Heads stay in any case, and the root, which is not returned; lookups never do.
    """
    live: set[str] = set(plan.own_units.heads)
    numel, numels = 0, plan.unit_numels()
    for unit in reversed(plan.run.forward_order()[1:]):
        if unit in plan.own_units:
            continue
        numel += numels[unit]
        if numel > plan.policy.max_live_parameters:
            break
        live.add(unit)
    return live


def reshards_after_forward(kind: GroupKind, unit: str, plan: Plan, live: set[str]) -> bool:
    """Whether a group is resharded between forward and backward. `live` contains the units that stay unsharded.

    The root's groups stay unsharded, because the backward starts with them. The model-wide group stays unsharded for
    the whole optimizer step.
    """
    return plan.policy.stage == 3 and unit != "" and kind != "model-wide" and unit not in live


def backward_order(plan: Plan) -> list[str]:
    """Return the units in the order in which their backwards begin, without those that are not unsharded for them."""
    return [unit for unit in plan.run.backward_order() if unit not in plan.own_units]


def fits(order: Sequence[str], plan: Plan, size: int) -> dict[str, list[str]]:
    """Return for each unit of `order` those right after it whose elements together are at most `size`."""
    numels = plan.unit_numels()
    ahead: dict[str, list[str]] = {}
    for index, unit in enumerate(order):
        ahead[unit], numel = [], 0
        for other in order[index + 1 :]:
            numel += numels[other]
            if numel > size:
                break
            ahead[unit].append(other)
    return ahead

"""Decides which groups are resharded after their forward, and which units are prefetched."""

from collections.abc import Sequence

from zeroamp.planning.groups import GroupKind
from zeroamp.planning.plan import Plan


def live_units(plan: Plan) -> set[str]:
    """Return the units that stay unsharded between forward and backward.

    These are the heads, and the last units of the forward with at most `max_live_parameters` elements together. The
    root stays unsharded too, and is not returned. Embeddings that are units of their own do not stay.
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
    """Return whether a group is resharded between forward and backward. `live` is the result of `live_units`.

    The root's groups stay unsharded, because the backward starts with them. The model-wide group stays unsharded for
    the whole optimizer step.
    """
    return plan.policy.stage == 3 and unit != "" and kind != "model-wide" and unit not in live


def backward_order(plan: Plan) -> list[str]:
    """Return the units in the order in which their backwards begin, without embeddings and heads of their own."""
    return [unit for unit in plan.run.backward_order() if unit not in plan.own_units]


def fits(order: Sequence[str], plan: Plan, size: int) -> dict[str, list[str]]:
    """Return {unit: the units right after it in `order` that have at most `size` elements together}."""
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

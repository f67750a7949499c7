"""Explicit prefetching: each unit starts the gathers of those that run after it.

[Note: Who starts them]
FSDP2 starts a module's prefetches right after the module's own gather, and several groups belong to one unit: its own
and its holders'. Whichever gathers last starts them, so that no group of the running unit queues behind another unit's.
In forward that is the last holder that was attached, since holders gather after the unit; in backward it is the unit,
since the holders' hooks are on its outputs first. In backward the others are told to fetch what their unit gathers
next: with no list of their own, each would fetch the group before it in FSDP2's record of the forward, as by default.

Modules that run in another order than they are registered still get current parameters. A unit that is fetched after
it ran in the forward keeps that copy until its backward, which then gathers nothing; one that is fetched after it ran
in the backward is gathered once more than needed, and that copy is dropped at the end of the backward, or used by the
next micro-batch's forward.
"""

from collections.abc import Mapping
from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeroamp.planning.plan import Plan
from zeroamp.planning.schedule import fits


def attach_prefetch(model: nn.Module, plan: Plan, holders: Mapping[str, FSDPModule]) -> None:
    """Set what each unit, and the root, fetches ahead at stage 3. Without a bucket it is left to FSDP2."""
    size = plan.policy.prefetch_bucket_size
    if plan.policy.stage != 3 or size <= 0:
        return
    # Attach order, which is the plan's; the model-wide group is gathered once, by the root.
    gathered = {unit: [cast(FSDPModule, model.get_submodule(unit))] for unit in ("", *plan.units)}
    for group in plan.groups:
        if group.name in holders:
            gathered[group.unit].append(holders[group.name])
    for unit, ahead in fits(plan.run.forward_order(), plan, size).items():
        gathered[unit][-1].set_modules_to_forward_prefetch([m for other in ahead for m in gathered[other]])
    for unit, ahead in fits(plan.run.backward_order(), plan, size).items():
        if ahead:
            own = gathered[unit]
            own[0].set_modules_to_backward_prefetch([m for other in ahead for m in gathered[other][::-1]])
            for holder in own[1:]:
                holder.set_modules_to_backward_prefetch([own[0]])

"""Sets explicit prefetching: each FSDP unit starts the all-gathers of the units that run after it.

[Note: Which group starts them]
FSDP2 starts a module's prefetches right after the module's own all-gather. A unit may have several groups: its own, and
those of its group holders. The group that is all-gathered last starts the prefetches, so that no group of the running
unit queues behind another unit. In the forward that is the last holder that was attached, because holders unshard after
the unit. In the backward it is the unit, because the hooks of the holders are on its outputs first. The holders then
prefetch the unit: with an empty list, FSDP2 would let each prefetch the group before it in its record of the forward.

Modules that run in another order than they are registered still get current parameters. A unit that is prefetched after
its forward stays unsharded until its backward. A unit that is prefetched after its backward is all-gathered once more
than needed; the copy is released at the end of the backward, or used by the forward of the next micro-batch.
"""

from collections.abc import Mapping
from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeroamp.planning.plan import Plan
from zeroamp.planning.schedule import backward_order, fits


def attach_prefetch(model: nn.Module, plan: Plan, holders: Mapping[str, FSDPModule]) -> None:
    """Set the modules that each unit and the root prefetch at stage 3. With a bucket of 0 elements FSDP2 decides.

    `holders`: name of a group -> its group holder.
    """
    size = plan.policy.prefetch_bucket_size
    if plan.policy.stage != 3 or size <= 0:
        return
    # In the order in which the groups were attached, which is the plan's.
    gathered = {unit: [cast(FSDPModule, model.get_submodule(unit))] for unit in ("", *plan.units)}
    for group in plan.groups:
        if group.name in holders:
            gathered[group.unit].append(holders[group.name])
    for unit, ahead in fits(plan.run.forward_order(), plan, size).items():
        gathered[unit][-1].set_modules_to_forward_prefetch([m for other in ahead for m in gathered[other]])
    for unit, ahead in fits(backward_order(plan), plan, size).items():
        if ahead:
            own = gathered[unit]
            own[0].set_modules_to_backward_prefetch([m for other in ahead for m in gathered[other][::-1]])
            for holder in own[1:]:
                holder.set_modules_to_backward_prefetch([own[0]])

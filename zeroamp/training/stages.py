"""The flags of FSDP2 that make the ZeRO stages, set before every backward."""

from collections.abc import Sequence
from typing import cast

from torch.distributed.fsdp import FSDPModule

from zeroamp.hooks._torch.fsdp import complete_accumulation
from zeroamp.wrapping.state import WrapState


def set_flags(state: WrapState, units: Sequence[FSDPModule], *, is_first: bool, is_last: bool) -> None:
    """Say what FSDP2 does in the backward of a window's first, last or other micro-batch.

    Stages 0 and 1 reduce once per window; stages 0 to 2 keep parameters gathered until its end; stage 3 only the
    model-wide group, which the next forward would gather first. See the table of stages in docs/precision.md.
    """
    stage = state.plan.policy.stage
    root = cast(FSDPModule, state.root)
    if is_last and stage < 2 and not is_first:
        for unit in units:
            complete_accumulation(unit)
    root.set_is_last_backward(is_last)
    root.set_requires_gradient_sync(is_last or stage >= 2)
    root.set_reshard_after_backward(is_last or stage == 3)
    for group in state.plan.groups:
        if group.kind == "model-wide":
            state.holders[group.name].set_reshard_after_backward(is_last, recurse=False)

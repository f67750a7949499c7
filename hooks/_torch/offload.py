"""Calls back when FSDP2 has started to copy a group's reduced gradients to offloaded shards.

Checked on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zeroamp.hooks._torch.fsdp import groups_of, units_of

AfterReduction = Callable[[Sequence[nn.Parameter], Any], None]
"""Called with the sharded parameters of a group, and with the event after which each `parameter.grad` is valid, or None
if it is valid already. Parameters that were not reduced have no `grad`."""


def after_each_reduction(root: nn.Module, callback: AfterReduction) -> None:
    """Call back after FSDP2's post-backward of each parameter group of `root`, whether the group was reduced or not.

    `register_post_accumulate_grad_hook` cannot be used: its hook runs once per parameter, before FSDP2 records the
    group's event. From torch 2.13 on, FSDP2 also waits for the copy of each gradient whose parameter has such a hook.
    """
    for unit in units_of(root):
        for group in groups_of(unit._get_fsdp_state()):
            if not hasattr(group.post_backward, "calls_back"):  # the modules of a merged unit share their group
                group.post_backward = _calling_back(group, callback)


def _calling_back(group: Any, callback: AfterReduction) -> Callable[..., Any]:
    inner = group.post_backward

    def post_backward(*unused: Any) -> Any:
        result = inner(*unused)
        callback([parameter.sharded_param for parameter in group.fsdp_params], group._post_reduce_event)
        return result

    post_backward.calls_back = True  # type: ignore[attr-defined]
    return post_backward

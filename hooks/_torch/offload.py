"""The place of FSDP2 at which a group's gradients are on their way to offloaded shards.

Checked on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zeroamp.hooks._torch.fsdp import groups_of, units_of

AfterReduction = Callable[[Sequence[nn.Parameter], Any], None]
"""Gets the sharded parameters of a group, and the event after which `parameter.grad` holds its values; None if it does
already. Parameters that were not reduced have no `grad`."""


def after_each_reduction(root: nn.Module, callback: AfterReduction) -> None:
    """Call back after the post-backward of each parameter group of `root` that FSDP2 has, whether it reduced or not.

    A hook of `register_post_accumulate_grad_hook` would run once per parameter, before the event of the group is there;
    and from torch 2.13 on FSDP2 copies gradients of parameters with such a hook one after the other, each time waiting.
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

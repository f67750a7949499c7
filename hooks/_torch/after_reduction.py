"""Calls back after FSDP2 has reduced a parameter group. Checked on torch 2.11.0, 2.13.0 and 2.15.0."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zeroamp.hooks._torch.parameter_group import ParameterGroup, parameter_groups

AfterReduction = Callable[[Sequence[nn.Parameter], Any], None]
"""Called with the sharded parameters of a group, and with the event after which each `parameter.grad` is valid, or None
if it is valid already. Parameters that were not reduced have no `grad`."""


def after_each_reduction(root: nn.Module, callback: AfterReduction) -> None:
    """Call back after FSDP2's post-backward of each parameter group of `root`, whether the group was reduced or not.

    `register_post_accumulate_grad_hook` cannot be used: its hook runs once per parameter, before FSDP2 records the
    group's event. From torch 2.13 on, FSDP2 also waits for the copy of each gradient whose parameter has such a hook.
    """
    for group, _ in parameter_groups(root):
        _call_after_reduction(group, callback)


def _call_after_reduction(group: ParameterGroup, callback: AfterReduction) -> None:
    def post_backward(*unused: Any) -> Any:
        result = inner(*unused)
        callback([each.sharded for each in group.parameters], group.reduced)
        return result

    inner = group.replace("post_backward", post_backward)

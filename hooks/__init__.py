"""What is attached to a module or to a collective."""

from zeroamp.hooks.autocast import AutocastHook
from zeroamp.hooks.backward_guard import BackwardGuard
from zeroamp.hooks.reduce_scatter import WireReduceScatter
from zeroamp.hooks.typed_groups import Holder, attach_typed_group, group_policy, shard_typed_group, typed_group_hooks

__all__ = [
    "AutocastHook",
    "BackwardGuard",
    "Holder",
    "WireReduceScatter",
    "attach_typed_group",
    "group_policy",
    "shard_typed_group",
    "typed_group_hooks",
]

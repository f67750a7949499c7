"""FSDP2's own hooks, excluded from `torch.compile` once instead of in each call.

From torch 2.12 on, each call of an FSDP2 hook makes another function that `torch.compile` does not trace, and calls
that. Making it takes the host about 3 microseconds: five times per unit in a forward and a backward. Here the function
is made once. Torch 2.11 does not make any: nothing is replaced.
"""

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks._torch.dispatch import untraced
from zeroamp.hooks._torch.fsdp import groups_of, units_of

OF_STATE = ("_pre_forward", "_post_forward", "_pre_backward")
OF_GROUP = ("pre_backward", "post_backward")

_untraced = cache(untraced)  # one function for all units


def exclude_hooks_once(root: nn.Module) -> None:
    """Replace FSDP2's hooks of every unit. Call after `fully_shard` of all units, and before what wraps these hooks."""
    for unit in units_of(root):
        state: Any = unit._get_fsdp_state()
        for name in OF_STATE:
            _replace(state, name)
        for group in groups_of(state):
            for name in OF_GROUP:
                _replace(group, name)
        handles = {"_pre_forward": state._pre_forward_hook_handle, "_post_forward": state._post_forward_hook_handle}
        for name, handle in handles.items():
            # A unit of several modules has other hooks, behind a handle of several.
            if name in vars(state) and isinstance(handle, RemovableHandle):
                hooks: Any = handle.hooks_dict_ref()
                hooks[handle.id] = getattr(state, name)  # in the place of FSDP2's


def _replace(owner: Any, name: str) -> None:
    """Set the method as an attribute of the instance, if FSDP2 excludes it in each call."""
    method = getattr(type(owner), name)
    if name not in vars(owner) and _is_excluded_in_each_call(method):
        setattr(owner, name, MethodType(_untraced(method.__wrapped__), owner))


def _is_excluded_in_each_call(method: Callable[..., Any]) -> bool:
    exclude = getattr(_fsdp_common, "_dynamo_disable", None)
    return exclude is not None and getattr(method, "__code__", None) is exclude(_replace).__code__

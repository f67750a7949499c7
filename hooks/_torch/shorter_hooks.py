"""Saves host time in FSDP2's hooks: does two things once that FSDP2 repeats in each call.

torch 2.13 repeats both of them, torch 2.15 only the first, torch 2.11 neither.

[Note: Functions made in each call]
Each call of an FSDP2 hook makes a new function that `torch.compile` does not trace, and calls that function. Making it
takes the host about 3 microseconds, five times per unit in a forward and a backward. Here the function is made once.

[Note: A signature in each call]
The autograd function that starts a group's reduction has a `setup_context`. `torch.autograd.Function.apply` then
inspects the signature of the function's `forward` in each call, to fill in default arguments. FSDP2's `forward` has no
default arguments. The inspection takes about 10 microseconds per unit and forward. `_PostBackward.apply` leaves the
inspection out, except inside transforms of `torch.func`, for which torch has another implementation. From torch 2.15
on, `apply` is C++ and inspects the signature itself.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch._functorch.utils import unwrap_dead_wrappers
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param_group
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks._torch.dispatch import untraced
from zeroamp.hooks._torch.fsdp import groups_of, units_of

OF_STATE = ("_pre_forward", "_post_forward", "_pre_backward")
OF_GROUP = ("pre_backward", "post_backward")

_untraced = cache(untraced)  # one function for all units


def shorten_hooks(root: nn.Module) -> None:
    """Replace FSDP2's hooks on all units. Call after `fully_shard` of all units, before other code wraps the hooks."""
    for unit in units_of(root):
        state: Any = unit._get_fsdp_state()
        for name in OF_STATE:
            _exclude_once(state, name)
        for group in groups_of(state):
            for name in OF_GROUP:
                _exclude_once(group, name)
            _inspect_no_signature(group)
        handles = {"_pre_forward": state._pre_forward_hook_handle, "_post_forward": state._post_forward_hook_handle}
        for name, handle in handles.items():
            # A unit of several modules has other hooks, with a handle of another type.
            if name in vars(state) and type(handle) is RemovableHandle:
                hooks: Any = handle.hooks_dict_ref()
                hooks[handle.id] = getattr(state, name)  # in the place of FSDP2's


def _exclude_once(owner: Any, name: str) -> None:
    """Replace a method of `owner`, if FSDP2 makes its `torch.compile`-excluded version anew in each call."""
    method = getattr(type(owner), name)
    if name not in vars(owner) and _is_excluded_in_each_call(method):
        setattr(owner, name, MethodType(_untraced(method.__wrapped__), owner))


def _is_excluded_in_each_call(method: Callable[..., Any]) -> bool:
    exclude = getattr(_fsdp_common, "_dynamo_disable", None)
    return exclude is not None and getattr(method, "__code__", None) is exclude(_exclude_once).__code__


def _inspect_no_signature(group: Any) -> None:
    """Make FSDP2's pre-forward apply `_PostBackward`. See [Note: A signature in each call]."""
    name = "_register_post_backward_hook"
    if name not in vars(group) and (method := _with_our_function(getattr(type(group), name))) is not None:
        setattr(group, name, MethodType(method, group))


@cache
def _with_our_function(method: FunctionType) -> FunctionType | None:
    """Return FSDP2's method with `_PostBackward` in place of its autograd function.

    None on torch versions whose `apply` does not inspect the signature in Python.
    """
    function = _fsdp_param_group.RegisterPostBackwardFunction
    is_python = isinstance(vars(torch.autograd.Function).get("apply"), classmethod)
    if not is_python or "setup_context" not in vars(function):
        return None

    class _PostBackward(function):  # type: ignore[misc, valid-type]
        @classmethod
        def apply(cls, *args: Any) -> Any:
            """Apply the function without inspecting the signature of its `forward`."""
            if torch._C._are_functorch_transforms_active():
                return super().apply(*args)
            return super(torch.autograd.Function, cls).apply(*unwrap_dead_wrappers(args))  # type: ignore[misc]

    _PostBackward.__name__ = _PostBackward.__qualname__ = function.__name__  # also of the nodes in a graph
    globals_of_method = {**method.__globals__, function.__name__: _PostBackward}
    return FunctionType(method.__code__, globals_of_method, method.__name__, method.__defaults__, method.__closure__)

"""Every name of torch's FSDP2 that is private or differs by version, in one place.

Checked on torch 2.11.0, 2.13.0 and 2.15.0; `tests/hooks/test_private_names.py` fails when one is gone.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

# The base class of custom reduce-scatters: its setter is public, the class itself is exported nowhere up to 2.15.
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

__all__ = ["FORWARD_HOOKS", "ReduceScatter", "forward_hooks", "reduce_scatter"]

FORWARD_HOOKS = ("_pre_forward", "_post_forward")
"""Methods of `FSDPState` that gather a group before a forward and release it after."""


class PreForward(Protocol):
    """A forward pre-hook with kwargs."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class PostForward(Protocol):
    """A forward hook."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any: ...


def forward_hooks(module: FSDPModule) -> tuple[PreForward, PostForward]:
    """Return the two hooks by which FSDP2 gathers and releases the parameters of `module`'s own group."""
    state = module._get_fsdp_state()
    pre_forward, post_forward = (getattr(state, name) for name in FORWARD_HOOKS)
    return pre_forward, post_forward


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, op: Any) -> None:
    """Run the backend's reduce-scatter of one flat tensor, by the name that this torch version does not deprecate."""
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    collective(output, input, op=op, group=group)

"""Typed groups: several parameter groups per FSDP unit, one for each combination of dtypes.

[Note: Holders]
FSDP2 all-gathers one flat buffer of one dtype per module that `fully_shard` was applied to. A unit with parameters of
two dtypes therefore needs two such modules. The second is a *group holder*: an empty module that is never called and
only owns the FSDP state of its group. Hooks on the unit unshard, reshard and reduce the group where the unit does.
`fully_shard([norm1, norm2])` needs no holder, but it hooks inner modules, which breaks `fullgraph` compilation of the
unit. It also cannot express a parameter whose owner has descendants in another group.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks._torch.fsdp import PostForward, PreForward, forward_hooks
from zeroamp.policies.errors import WrapError

HOLDER_NAME = "_zeroamp_group"

PlacementFn = Callable[[nn.Parameter], Shard | None]
"""For `fully_shard`: the placement of a parameter's shards; None is dimension 0."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Holder(nn.Module):
    """Owns one typed group's FSDP state. Never called, and empty, so that it adds no `state_dict` keys."""

    def __init__(self, group_name: str) -> None:
        super().__init__()
        self.group_name = group_name

    def forward(self, *_args: object, **_kwargs: object) -> None:
        """Raise: something iterates over the children of the module that this holder hangs in, and calls them."""
        raise WrapError(
            f"{HOLDER_NAME} was called. It only holds the FSDP state of the group {self.group_name}: skip children "
            f"whose name starts with {HOLDER_NAME}, or put the modules to call into a list."
        )

    def extra_repr(self) -> str:
        """Show the group's name in `print(model)`."""
        return self.group_name


def shard_typed_group(
    model: nn.Module,
    group_name: str,
    owners: Sequence[nn.Module],
    fqns: Iterable[str],
    *,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | int,
    offload_policy: OffloadPolicy,
    shard_placement_fn: PlacementFn | None = None,
) -> FSDPModule:
    """Shard the named parameters of `owners` as one group of their own; return its holder.

    Must run before `fully_shard` of any module that is an owner or contains one: FSDP2's walk stops at modules that
    carry its state. `owners` are all modules that own one of the parameters directly, tied ones included.
    """
    wanted = {id(model.get_parameter(fqn)) for fqn in fqns}
    holder = Holder(group_name)
    for index, owner in enumerate(owners):
        holder.add_module(str(index), owner)
    # Looked up now: sharding replaces Parameter objects, so sets collected before an earlier call are stale.
    ignored = {parameter for owner in owners for parameter in owner.parameters() if id(parameter) not in wanted}
    fully_shard(
        holder,
        mesh=mesh,
        mp_policy=mp_policy,
        reshard_after_forward=reshard_after_forward,
        offload_policy=offload_policy,
        shard_placement_fn=shard_placement_fn,
        ignored_params=ignored,
    )
    for index in range(len(owners)):
        delattr(holder, str(index))  # FSDP2 keeps its own references to the owners
    point = attachment_point(owners, model)
    num_taken = sum(name.startswith(HOLDER_NAME) for name, _ in point.named_children())
    point.add_module(f"{HOLDER_NAME}{num_taken or ''}", holder)
    return cast(FSDPModule, holder)


def attachment_point(owners: Sequence[nn.Module], model: nn.Module) -> nn.Module:
    """Choose where the holder hangs: FSDP2's root finds states by walking the module tree.

    A container would call or index the holder as one of its own, so the first owner that is none gets it.
    """
    inside = (module for owner in owners for module in owner.modules())
    for candidate in chain(owners, inside, model.modules()):  # lazily: there may be as many groups as modules
        if not isinstance(candidate, _CONTAINERS):
            return candidate
    raise AssertionError(f"expected a module that is no container in {type(model).__name__}, got none")


def typed_group_hooks(holder: FSDPModule) -> tuple[PreForward, PostForward]:
    """Return what unshards the holder's group (a pre-hook with kwargs) and what reshards it (a forward hook)."""
    return forward_hooks(holder)


def attach_typed_group(holder: FSDPModule, unit: nn.Module) -> list[RemovableHandle]:
    """Unshard the holder's group before `unit` runs and reshard it after; return the handles.

    Call after `fully_shard(unit)`: its own pre-hook must come first, because the root initialises all groups there.
    The post-hook comes before FSDP2's own, as the inner of two nested groups would.
    """
    pre_forward, post_forward = typed_group_hooks(holder)
    return [
        unit.register_forward_pre_hook(pre_forward, prepend=False, with_kwargs=True),
        unit.register_forward_hook(post_forward, prepend=True),
    ]


def group_policy(param_dtype: torch.dtype, accumulate: torch.dtype) -> MixedPrecisionPolicy:
    """Return FSDP2's policy for a group: dtype of the all-gather, and of the unsharded sum over micro-batches.

    The communication dtype is not in it: `GroupReduceScatter` casts on the way into the reduction. `reduce_dtype` is
    always set, because what None means changed in torch 2.15. Inputs are cast by `cast_inputs`.
    """
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=accumulate, cast_forward_inputs=False)


def place_shards(model: nn.Module, dims: Mapping[str, int]) -> PlacementFn | None:
    """Return a `shard_placement_fn` for the parameters with these FQNs and sharded dimensions; None if all are 0.

    Call right before the `fully_shard` that shards them: it knows the parameters by identity.
    """
    placements = {id(model.get_parameter(fqn)): Shard(dim) for fqn, dim in dims.items() if dim != 0}
    return (lambda parameter: placements.get(id(parameter))) if placements else None

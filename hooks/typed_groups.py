"""Typed groups: the parameter groups that a unit has beside FSDP2's own, one for each further combination of dtypes.

The model-wide group counts as a typed group of the root.

[Note: Holders]
FSDP2 all-gathers one flat buffer of one dtype per module that `fully_shard` was applied to. A unit with parameters of
two dtypes (pytorch issue 156784) therefore needs two such modules. The second is a *group holder*: an empty module that
is never called and only owns the FSDP state of its group. Hooks on the unit unshard, reshard and reduce the group
together with the unit.
`fully_shard([norm1, norm2])` would not need a holder. But it hooks inner modules, which breaks `fullgraph` compilation
of the unit, and it cannot leave out parameters of descendants that are in another group.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from zeroamp.hooks._torch.fsdp import PostForward, PreForward, forward_hooks
from zeroamp.policies.errors import WrapError

HOLDER_NAME = "_zeroamp_group"

PlacementFn = Callable[[nn.Parameter], Shard | None]
"""`shard_placement_fn` of `fully_shard`: returns the placement of a parameter's shards. None stands for dimension 0."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Holder(nn.Module):
    """Owns one typed group's FSDP state. Never called, and empty, so that it adds no `state_dict` keys."""

    def __init__(self, group_name: str) -> None:
        super().__init__()
        self.group_name = group_name

    def forward(self, *_args: object, **_kwargs: object) -> None:
        """Raise a WrapError. Code that iterates over a module's children and calls each also calls the holder."""
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
    """Shard the parameters with these FQNs as one parameter group; return its group holder.

    Call before `fully_shard` of any module that is an owner or contains one: FSDP2's walk stops at modules that have
    its state. `owners` are all modules that own one of the parameters directly, including those that share a tied one.
    """
    wanted = {id(model.get_parameter(fqn)) for fqn in fqns}
    holder = Holder(group_name)
    for index, owner in enumerate(owners):
        holder.add_module(str(index), owner)
    # Looked up now, because each `fully_shard` replaces Parameter objects: sets from before an earlier call are stale.
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
    """Return the module that gets the holder as a child: FSDP2's root finds states by walking the module tree.

    It is the first owner that is not a container. An `nn.Sequential` would call the holder, and an `nn.ModuleList`
    would count it.
    """
    inside = (module for owner in owners for module in owner.modules())
    for candidate in chain(owners, inside, model.modules()):  # lazily: there may be as many groups as modules
        if not isinstance(candidate, _CONTAINERS):
            return candidate
    raise AssertionError(f"expected a module that is no container in {type(model).__name__}, got none")


def typed_group_hooks(holder: FSDPModule) -> tuple[PreForward, PostForward]:
    """Return the forward pre-hook (with kwargs) that unshards the holder's group, and the hook that reshards it.

    FSDP2's pre-hook on the unit must run before the first one, because that of the root initialises all groups. The
    second one must run before FSDP2's own forward hook, as that of an inner unit would.
    """
    return forward_hooks(holder)


def group_policy(param_dtype: torch.dtype, accumulate: torch.dtype) -> MixedPrecisionPolicy:
    """Return FSDP2's mixed precision policy for a group.

    `param_dtype` is the dtype of the all-gather. `accumulate`, the dtype of the unsharded sum over micro-batches, is
    FSDP2's `reduce_dtype`. It is always set, because None changed its meaning in torch 2.15. The communication dtype is
    not in the policy: `GroupReduceScatter` casts gradients to it. `cast_inputs` casts inputs.
    """
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=accumulate, cast_forward_inputs=False)


def place_shards(model: nn.Module, dims: Mapping[str, int]) -> PlacementFn | None:
    """Return a `shard_placement_fn` for `dims`, the sharded dimension of each FQN; None if all dimensions are 0.

    Call right before the `fully_shard` of these parameters: they are identified by their `id`.
    """
    placements = {id(model.get_parameter(fqn)): Shard(dim) for fqn, dim in dims.items() if dim != 0}
    return (lambda parameter: placements.get(id(parameter))) if placements else None

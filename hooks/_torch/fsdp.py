"""The private names of FSDP2, and those that differ by version.

Checked on torch 2.11.0, 2.13.0 and 2.15.0; `tests/hooks/_torch/test_private_names.py` fails when one is gone.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

FORWARD_HOOKS = ("_pre_forward", "_post_forward")
"""Methods of `FSDPState` that unshard a group before a forward and reshard it after."""

COMMUNICATION = ("unshard", "wait_for_unshard", "post_backward")  # of FSDPParamGroup: all-gather, wait, reduce

END_OF_BACKWARD = "_root_post_backward_final_callback"  # of FSDPState: waits for the last reductions

PreForward = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""A forward pre-hook with kwargs."""

PostForward = Callable[[nn.Module, Any, Any], Any]
"""A forward hook."""


def forward_hooks(module: FSDPModule) -> tuple[PreForward, PostForward]:
    """Return the two hooks by which FSDP2 unshards and reshards the parameters of `module`'s own group."""
    state = module._get_fsdp_state()
    pre_forward, post_forward = (getattr(state, name) for name in FORWARD_HOOKS)
    return pre_forward, post_forward


def release(module: FSDPModule) -> None:
    """Reshard `module`'s own groups, in whatever state the last forward left them."""
    for group in groups_of(module._get_fsdp_state()):
        release_group(group)


def release_group(group: Any) -> None:
    """Reshard a parameter group of FSDP2, in whatever state the last forward left it.

    `FSDPModule.reshard` would leave a prefetched all-gather that was never waited for. A later forward would use its
    old values.
    """
    group.wait_for_unshard()
    group._to_sharded()


def recorded_forwards(root: nn.Module) -> list[Any]:
    """Return FSDP2's record of the groups whose forward has run, by which it prefetches in the next backward."""
    record: list[Any] = getattr(cast(FSDPModule, root)._get_fsdp_state()._comm_ctx, "post_forward_order", [])
    return record


def forget_forwards(root: nn.Module, num_recorded: int) -> None:
    """Remove all but the first `num_recorded` entries from the record, because no backward of the others follows."""
    del recorded_forwards(root)[num_recorded:]
    for unit in units_of(root):
        for group in groups_of(unit._get_fsdp_state()):
            group._post_forward_indices = [index for index in group._post_forward_indices if index < num_recorded]


@torch.no_grad()
def take_sharded_memory(module: FSDPModule) -> None:
    """Make FSDP2 all-gather `module`'s own group from the memory that its sharded parameters have now."""
    for group in groups_of(module._get_fsdp_state()):
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()


def communication_methods(root: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield (object, name) of the methods in which FSDP2 starts collectives or waits for them."""
    for unit in units_of(root):
        state: Any = unit._get_fsdp_state()
        yield from ((group, name) for group in groups_of(state) for name in COMMUNICATION)
        yield state, END_OF_BACKWARD


def unsharded_sums(unit: FSDPModule) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield (sharded parameter, unsharded gradient) of parameters that have such a gradient between micro-batches."""
    for group in groups_of(unit._get_fsdp_state()):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "unsharded_param"):
                # FSDP2's sum in the accumulation dtype; or autograd's, if the accumulation dtype is the parameter's.
                total = parameter.unsharded_accumulated_grad
                total = parameter.unsharded_param.grad if total is None else total
                if total is not None:
                    yield parameter.sharded_param, total


def parameter_pairs(root: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter | None]]:
    """Yield (sharded parameter, unsharded parameter) of all groups; the second is None before the first unshard.

    If a parameter of a module was replaced, FSDP2 still has the old one, which is yielded here.
    """
    for unit in units_of(root):
        for group in groups_of(unit._get_fsdp_state()):
            for parameter in group.fsdp_params:
                yield parameter.sharded_param, getattr(parameter, "unsharded_param", None)


def flat_shards(root: nn.Module) -> list[torch.Tensor]:
    """Return the tensors from which FSDP2 all-gathers: the memory of the sharded parameters, with padding."""
    groups = (group for unit in units_of(root) for group in groups_of(unit._get_fsdp_state()))
    return [parameter._sharded_param_data for group in groups for parameter in group.fsdp_params]


def can_be_sharded(parameter: nn.Parameter) -> bool:
    """Return whether FSDP2 can shard a parameter: it has at least one dimension and at least one element."""
    return parameter.dim() > 0 and parameter.numel() > 0


def can_shard_integers(mesh: DeviceMesh) -> bool:
    """Return whether FSDP2 of this torch shards frozen parameters of an integer dtype (pytorch issue 177844).

    The fix has no public name. So the function shards a parameter on the meta device, which communicates nothing.
    """
    probe = nn.Module()
    probe.weight = nn.Parameter(torch.empty(1, dtype=torch.uint8, device="meta"), requires_grad=False)
    try:
        fully_shard(probe, mesh=mesh)
    except RuntimeError:
        return False
    return True


def set_accumulation_dtype(unit: FSDPModule, dtype: torch.dtype) -> bool:
    """Make `unit`'s groups sum unsharded gradients in `dtype` from the next backward on; return whether it was set.

    FSDP2 reads this dtype once, from its `reduce_dtype`. From torch 2.15 on, autograd sums, and its dtype cannot be
    changed later: nothing is set, and False is returned.
    """
    for group in groups_of(unit._get_fsdp_state()):
        for parameter in group.fsdp_params:
            if isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property):
                return False
            computed = parameter.param_dtype or parameter.orig_dtype
            parameter.reduce_dtype = None if dtype == computed else dtype  # FSDP2 has None for "the computed dtype"
            group._reduce_dtype = parameter.reduce_dtype
    return True


@contextmanager
def all_gathering_as_stored(root: nn.Module) -> Iterator[None]:
    """All-gather all groups in the dtypes in which their parameters are stored, until the context ends.

    Their raw gradients have these dtypes too. Call after a first forward, and enter and leave the context while all
    groups are sharded. FSDP2 makes other unsharded parameters inside; its own have no memory while they are sharded.
    """
    names = ("param_dtype", "reduce_dtype", "all_gather_outputs", "_unsharded_param")
    before: list[tuple[Any, dict[str, Any]]] = []
    for group in (group for unit in units_of(root) for group in groups_of(unit._get_fsdp_state())):
        before.append((group, {"_reduce_dtype": group._reduce_dtype}))
        group._reduce_dtype = torch.float32
        for parameter in group.fsdp_params:
            before.append((parameter, {name: vars(parameter)[name] for name in names if name in vars(parameter)}))
            parameter.param_dtype, parameter.reduce_dtype = None, torch.float32
            parameter.all_gather_outputs = []
            vars(parameter).pop("_unsharded_param", None)
    try:
        yield
    finally:
        for owner, values in before:
            vars(owner).update(values)


def divide_factor(unit: FSDPModule) -> float | None:
    """Return the factor of `set_gradient_divide_factor` for `unit`'s own groups; None if gradients are averaged."""
    for group in groups_of(unit._get_fsdp_state()):
        factor: float | None = group.gradient_divide_factor
        return factor
    return None


def divide_factors(root: nn.Module) -> Iterator[tuple[str, float | None]]:
    """Yield (FQN, factor) of each module with FSDP2 parameter groups; see `divide_factor`."""
    for fqn, module in root.named_modules():
        if isinstance(module, FSDPModule) and groups_of(module._get_fsdp_state()):
            yield fqn, divide_factor(module)


def init_unsharded(root: FSDPModule) -> None:
    """Make FSDP2 create its unsharded parameters now, by unsharding and resharding groups that never were unsharded.

    FSDP2 creates these tensors in the first all-gather, and reuses them in all later ones.
    """
    for unit in units_of(cast(nn.Module, root)):
        parameters = [p for group in groups_of(unit._get_fsdp_state()) for p in group.fsdp_params]
        if not all(hasattr(parameter, "unsharded_param") for parameter in parameters):
            FSDPModule.unshard(unit)  # its own groups only
            FSDPModule.reshard(unit)


def discard_unsharded_gradients(units: Iterable[FSDPModule]) -> None:
    """Discard the unsharded gradients of the units' own groups, which micro-batches without a reduction have left."""
    for group in (group for unit in units for group in groups_of(unit._get_fsdp_state())):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "unsharded_param"):
                parameter.unsharded_param.grad = None
                if "unsharded_accumulated_grad" in vars(parameter):  # up to 2.14
                    parameter.unsharded_accumulated_grad = None


def end_failed_backward(root: FSDPModule) -> None:
    """Discard unsharded gradients and, if a backward raised, end it: FSDP2 would not end the next one."""
    discard_unsharded_gradients(units_of(cast(nn.Module, root)))
    if hasattr(FSDPModule, "reset_iter_state"):
        FSDPModule.reset_iter_state(root)  # the class's: the method on the instance also resets zeroamp's state
    else:  # up to 2.12
        state = root._get_fsdp_state()
        getattr(type(state), END_OF_BACKWARD)(state)  # not the methods around it, which report a backward


def leave_fsdp(module: nn.Module, plain: type[nn.Module]) -> None:
    """Make `module`, to which `fully_shard` was applied, an instance of the class `plain` without FSDP2 state.

    `plain` is the class that it had before. torch has no public way back: `fully_shard` sets the class of the instance
    to a subclass, so it is set again. Its parameters and the entries of its `__dict__` are left to the caller.
    """
    module.__class__ = plain
    _module_state_mapping.pop(module, None)


def remove_late_hooks(root: nn.Module) -> None:
    """Remove the hooks on `state_dict` and `load_state_dict` that FSDP2 has registered since `fully_shard`.

    Each group registers a function of its own module when it is first unsharded, on the modules of its parameters.
    """
    homes = {type(group).__module__ for unit in units_of(root) for group in groups_of(unit._get_fsdp_state())}
    for entries in (each for module in root.modules() for each in vars(module).values() if isinstance(each, dict)):
        for key in [key for key, value in entries.items() if getattr(value, "__module__", None) in homes]:
            del entries[key]


def units_of(root: nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules with FSDP2 state, group holders included, in the order of the module tree."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of one module's FSDP2 state; empty for a module without parameters of its own."""
    # A list since 2.12, one or None before.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, op: Any) -> None:
    """Run the backend's reduce-scatter of one flat tensor, by the name that this torch version does not deprecate."""
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    collective(output, input, op=op, group=group)


def all_gather(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool
) -> dist.Work | None:
    """Run the backend's all-gather of one flat tensor, by the name that this torch version does not deprecate."""
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = collective(output, input, group=group, async_op=async_op)
    return work


def gather_in_background(root: FSDPModule, *, enable: bool = True) -> None:
    """Let all-gathers overlap with computation on devices without streams, until their unit waits for them.

    By default FSDP2 waits at once for an all-gather that it prefetches in the backward.
    """
    for unit in units_of(cast(nn.Module, root)):
        for group in groups_of(unit._get_fsdp_state()):
            group.unshard_async_op = enable


def leave_replicas_alone(unit: FSDPModule) -> None:
    """Make FSDP2 sum the gradients of `unit`'s own groups over the ranks that shard only, not over replicas.

    The groups' collectives no longer use the mesh's first axis; the DTensors of parameters and gradients retain it.
    FSDP2 still calls the hook of `set_all_reduce_hook` after each reduction, in its stream for all-reduces.
    """
    for group in groups_of(unit._get_fsdp_state()):
        info = group.mesh_info
        alone = FSDPMeshInfo(mesh=info.mesh, shard_mesh_dim=info.shard_mesh_dim)
        if group.post_forward_mesh_info is info:  # FSDP2 compares the two objects to see if the ranks are the same
            group.post_forward_mesh_info = alone
        group.mesh_info = alone


def are_replicas_left(unit: FSDPModule) -> bool:
    """Return whether `leave_replicas_alone` was called for `unit`'s own groups."""
    infos = [group.mesh_info for group in groups_of(unit._get_fsdp_state())]
    return any(type(info) is FSDPMeshInfo and info.mesh.ndim == 2 for info in infos)


def timeout_of(group: dist.ProcessGroup, device_type: str) -> timedelta:
    """Return the timeout of a process group's collectives. `dist.new_group` does not inherit it: pass it on."""
    options = group._get_backend(torch.device(device_type)).options
    timeout: timedelta = default_pg_timeout if options is None else options._timeout  # torch's "fake" has no options
    return timeout

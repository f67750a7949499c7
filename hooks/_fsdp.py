"""Every name of torch that is private or differs by version, in one place: FSDP2's, and the dispatch layer's.

Checked on torch 2.11.0, 2.13.0 and 2.15.0; `tests/hooks/test_private_names.py` fails when one is gone.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

# `torch.compiler.disable` imports torch._dynamo where it decorates a function; this one where that is first called.
from torch._compile import _disable_dynamo as untraced

# Used by many, but in private modules all the same.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Variable, profiler
from torch.distributed.fsdp import FSDPModule

# The base classes of custom collectives: their setters are public, the classes are exported nowhere up to 2.15.
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

__all__ = [
    "AllGather",
    "FakeTensorMode",
    "ReduceScatter",
    "StorageWeakRef",
    "TorchDispatchMode",
    "tree_map",
    "untraced",
]

FORWARD_HOOKS = ("_pre_forward", "_post_forward")
"""Methods of `FSDPState` that gather a group before a forward and release it after."""
COMMUNICATION = ("unshard", "wait_for_unshard", "post_backward")  # of FSDPParamGroup: gather, wait, reduce
END_OF_BACKWARD = "_root_post_backward_final_callback"  # of FSDPState: waits for the last reductions

PreForward = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""A forward pre-hook with kwargs."""
PostForward = Callable[[nn.Module, Any, Any], Any]
"""A forward hook."""


def forward_hooks(module: FSDPModule) -> tuple[PreForward, PostForward]:
    """Return the two hooks by which FSDP2 gathers and releases the parameters of `module`'s own group."""
    state = module._get_fsdp_state()
    pre_forward, post_forward = (getattr(state, name) for name in FORWARD_HOOKS)
    return pre_forward, post_forward


def modules_to_run(module: FSDPModule) -> set[nn.Module]:
    """Return the set in which FSDP2 keeps which modules of a group of several have yet to run in this forward.

    Newer versions finish, at the end of the root's forward, the states whose set is not empty by then. On 2.11 it must
    be cleared after a backward that is not the last of a window: of a group of which only some modules were recomputed
    there, the next forward would take the first module for a later one.
    """
    waiting: set[nn.Module] = module._get_fsdp_state()._modules_to_run_forward
    return waiting


def release(module: FSDPModule) -> None:
    """Put the sharded parameters of `module`'s own group back, whatever the last forward left of it.

    `FSDPModule.reshard` would leave a gather that was started ahead and never waited for, which a later forward would
    take for current; and it does nothing for a group of several modules of which a forward ran only some.
    """
    modules_to_run(module).clear()
    for group in _groups(module._get_fsdp_state()):
        group.wait_for_unshard()
        group._to_sharded()


def abandon(root: FSDPModule) -> None:
    """Forget a forward or backward that raised midway: the next forward starts as if it had not been.

    Shards are back in place, and unsharded gradients are dropped. Newer versions bring most of it themselves.
    """
    units = list(_units(cast(nn.Module, root)))
    groups = [group for unit in units for group in _groups(unit._get_fsdp_state())]
    state: Any = root._get_fsdp_state()
    if not state._state_ctx.all_states:  # before the first forward there is nothing to forget, and no streams either
        return
    for group in groups:
        _drop_gather(group)
    for unit in units:
        release(unit)
    if hasattr(state, "_reset_iter_state"):  # from 2.13 on
        state._reset_iter_state()
    else:
        _reset_iteration(state)
    for parameter in (parameter for group in groups for parameter in group.fsdp_params):
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
            if "unsharded_accumulated_grad" in vars(parameter):  # up to 2.14
                parameter.unsharded_accumulated_grad = None


def _drop_gather(group: Any) -> None:
    """Wait for a gather that was started, and drop it: copying it out would need the memory that there was none of."""
    result, group._all_gather_result = group._all_gather_result, None
    if result is None:
        return
    if result.all_gather_event is not None:
        group.device_handle.current_stream().wait_event(result.all_gather_event)
    if isinstance(result.all_gather_work, dist.Work):
        result.all_gather_work.wait()


def _reset_iteration(state: Any) -> None:
    state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    for inner in state._state_ctx.all_states:
        idle = type(inner._training_state).IDLE
        inner._training_state = idle
        for group in _groups(inner):
            group._training_state = idle
            group._post_forward_indices.clear()
            group._partial_reduce_output = group._all_reduce_state = group._post_reduce_event = None


def communication_methods(root: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield (object, name) of the methods in which collectives start or are waited for; FSDP2 looks them up by name."""
    for state in (unit._get_fsdp_state() for unit in _units(root)):
        yield from ((group, name) for group in _groups(state) for name in COMMUNICATION)
        yield state, END_OF_BACKWARD


def unsharded_sums(unit: FSDPModule) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield (sharded parameter, its unsharded gradient) for those that have one between two micro-batches."""
    for group in _groups(unit._get_fsdp_state()):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                # In the dtype of accumulation; where that is the parameter's, autograd's own gradient is the sum.
                total = parameter.unsharded_accumulated_grad
                total = parameter._unsharded_param.grad if total is None else total
                if total is not None:
                    yield parameter.sharded_param, total


def storage_key(tensor: torch.Tensor) -> int:
    """Return what tells a tensor's storage from every other that is alive; views share it.

    Not the address of its data: FSDP2 frees and allocates that of a gathered parameter, and keeps the storage.
    """
    return int(tensor.untyped_storage()._cdata)


def _units(root: nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules that carry FSDP2's state, holders included, in the order of the module tree."""
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def _groups(state: Any) -> list[Any]:
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


def zero_fill_unused(root: FSDPModule) -> bool:
    """Let parameters without a gradient take part in the reduction as zeros; return whether this torch can (2.13+)."""
    enable = getattr(root, "set_reduce_scatter_unused_params", None)
    if enable is not None:
        enable(True)
    return enable is not None


def gather_in_background(root: FSDPModule, *, enable: bool = True) -> None:
    """Let a group's gather run on while the CPU computes, until its unit needs it: for devices that have no streams.

    Without it, a gather that FSDP2 starts ahead of a unit's backward is waited for at once.
    """
    root._set_unshard_async_op(enable)


def has_reduction_options() -> bool:
    """Return whether this torch (2.13+) can do the next two."""
    return hasattr(FSDPModule, "set_separate_reduce_scatter_group")


def keep_reduction_inputs(root: FSDPModule, num_inputs: int) -> None:
    """Let so many flat inputs of reductions be in flight. 1 is FSDP2's default, on versions that know no other too."""
    if num_inputs > 1:
        root.set_reduce_scatter_max_input_buffers(num_inputs)


def separate_reductions(root: FSDPModule, timeout: timedelta) -> None:
    """Give reductions a process group of their own. A collective call.

    FSDP2 would make it with the default timeout, so it is made here: FSDP2 takes one that is there.
    """
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for unit in _units(cast(nn.Module, root)):
        for group in _groups(unit._get_fsdp_state()):
            ranks = tuple(dist.get_process_group_ranks(group.mesh_info.shard_process_group))
            if ranks not in made:
                made[ranks] = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
            group.mesh_info.reduce_scatter_process_group = made[ranks]
    root.set_separate_reduce_scatter_group()


def complete_accumulation(unit: FSDPModule) -> None:
    """Before the reducing backward of a window: zeros for parameters that no earlier micro-batch of it used.

    Up to 2.14, FSDP2 refuses a reduction in which some gradients were accumulated (in the reduce dtype) and some were
    first computed in the last micro-batch (in the parameter's dtype). From 2.15 on it promotes them itself, and the
    accumulated gradient cannot be set.
    """
    for group in _groups(unit._get_fsdp_state()):
        parameters = [p for p in group.fsdp_params if p.sharded_param.requires_grad and hasattr(p, "_unsharded_param")]
        accumulated = [p.unsharded_accumulated_grad for p in parameters]
        dtype = next((gradient.dtype for gradient in accumulated if gradient is not None), None)
        if dtype is None or isinstance(getattr(type(parameters[0]), "unsharded_accumulated_grad", None), property):
            continue
        for parameter, gradient in zip(parameters, accumulated, strict=True):
            if gradient is None:
                parameter.unsharded_accumulated_grad = torch.zeros_like(parameter.unsharded_param, dtype=dtype)


def timeout_of(group: dist.ProcessGroup, device_type: str) -> timedelta:
    """Return how long the collectives of a group wait; a group made without a timeout would not take it over."""
    timeout: timedelta = group._get_backend(torch.device(device_type)).options._timeout
    return timeout


def storage_of(tensor: torch.Tensor) -> StorageWeakRef | None:
    """Return what tells a tensor's memory from every other, fake or real: equal for views of the same storage.

    It is a weak reference, so the memory can go, but its address is not used again while the reference lives.
    None for a layout that has no single storage.
    """
    if tensor.layout != torch.strided:
        return None
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_view_op(func: torch._ops.OpOverload) -> bool:
    """Return whether an op returns a view of its input. `_unsafe_view` does too, though its schema denies it."""
    return bool(func.is_view) or func.overloadpacket.__name__ == "_unsafe_view"


def run_op(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op. On fake tensors `_grouped_mm` takes bf16 only, though its kernels take fp32 too: go round that."""
    is_grouped_mm = func.overloadpacket.__name__ == "_grouped_mm"
    if not is_grouped_mm or not isinstance(args[0], FakeTensor) or {a.dtype for a in args[:2]} != {torch.float32}:
        return func(*args, **kwargs)
    return func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs).float()


def is_profiling() -> bool:
    """Return whether a profiler of torch records now: not in the waiting and warm-up steps of its schedule."""
    return profiler._is_profiler_enabled


def is_in_backward() -> bool:
    """Return whether autograd runs a backward in this thread: a forward in it is recomputed."""
    return backward_id() != -1


def backward_id() -> int:
    """Return a number of the backward that autograd runs in this thread, -1 if none: another one for each."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back once at the end of the backward that runs now, before what is queued after this."""
    Variable._execution_engine.queue_callback(callback)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether something is called at each step of an optimizer, by a hook on it or on all."""
    everywhere = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return bool(everywhere or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has another `step` than its class: not what torch's schedulers put there, to count.

    That it was put there by them says an attribute, which a wrapper around it has too: it wraps that of the class.
    """
    step = vars(optimizer).get("step")
    is_scheduled = hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step
    return step is not None and not is_scheduled

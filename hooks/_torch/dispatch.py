"""The private names of the dispatcher, of fake tensors, of autograd and of the profiler."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

# `torch.compiler.disable` imports torch._dynamo where it decorates a function; this one where that is first called.
from torch._compile import _disable_dynamo as untraced

# Used by many, but in private modules all the same.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Variable, profiler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.flop_counter import flop_registry

__all__ = [
    "FakeTensorMode",
    "StorageWeakRef",
    "TorchDispatchMode",
    "accumulates_in",
    "at_end_of_backward",
    "backward_id",
    "count_op_flops",
    "is_in_backward",
    "is_profiling",
    "is_view_op",
    "run_op",
    "storage_key",
    "storage_of",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "untraced",
    "without_base",
]


def storage_key(tensor: torch.Tensor) -> int:
    """Return what tells a tensor's storage from every other that is alive; views share it.

    Not the address of its data: FSDP2 frees and allocates that of a gathered parameter, and keeps the storage.
    """
    return int(tensor.untyped_storage()._cdata)


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


def without_base(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the memory and the autograd history of one that is a view, but which is no view itself.

    As the output of `nn.Linear` without a bias is. For a view whose base nobody else has.
    """
    if tensor._base is None:
        return tensor
    output: torch.Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
    return output


def run_op(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op, with the results that kernels have where those of fake tensors differ.

    `_grouped_mm` takes bf16 only on fake tensors, though its kernels take others too. `wait_tensor` makes another
    tensor there, though its kernel returns its argument.
    """
    if func.overloadpacket.__name__ == "wait_tensor" and isinstance(args[0], FakeTensor):
        return args[0]
    is_grouped_mm = func.overloadpacket.__name__ == "_grouped_mm"
    if not is_grouped_mm or not isinstance(args[0], FakeTensor) or args[0].dtype != args[1].dtype:
        return func(*args, **kwargs)
    return func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs).to(args[0].dtype)


def count_op_flops(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the FLOPs of an op by torch's registry, 2 per multiply-add; 0 for ops that are not in the registry.

    `_grouped_mm`, which multiplies transformers' experts, is not in the registry and is counted here. `a` and `b` are
    2-D or 3-D. Each row of a 2-D `a` belongs to one group, and so does each column of a 2-D `b` beside a 3-D `a`.
    """
    if func.overloadpacket.__name__ == "_grouped_mm":
        a, b = args[:2]
        rows = a[0] if a.dim() == 3 and b.dim() == 2 else a
        return 2 * int(rows.numel() * b.shape[-1])
    formula = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def is_profiling() -> bool:
    """Return whether a profiler of torch records now: not in the waiting and warm-up steps of its schedule."""
    return profiler._is_profiler_enabled


def is_in_backward() -> bool:
    """Return whether autograd runs a backward in this thread: a forward in it is recomputed."""
    return backward_id() != -1


def backward_id() -> int:
    """Return a number of the backward that autograd runs in this thread, -1 if none: another one for each."""
    return torch._C._current_graph_task_id()


def accumulates_in(leaves: Iterable[torch.Tensor]) -> bool:
    """Return whether the backward that runs now sets or adds to `grad` of any of these tensors.

    `torch.autograd.grad` does not, and `backward(inputs=...)` does for its inputs only. Call it in a hook of a tensor.
    """
    try:
        nodes = (torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves if leaf.requires_grad)
        return any(torch._C._will_engine_execute_node(node) for node in nodes)
    except RuntimeError as error:
        if "autograd.grad()" not in str(error):
            raise
        return False  # of `torch.autograd.grad` with respect to one of the leaves


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back once at the end of the backward that runs now, before what is queued after this."""
    Variable._execution_engine.queue_callback(callback)

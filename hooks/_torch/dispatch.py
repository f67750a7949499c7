"""The private names of the dispatcher, of fake tensors, of autograd and of the profiler."""

from collections.abc import Callable
from typing import Any

import torch

# `torch.compiler.disable` imports torch._dynamo where it decorates a function; this one where that is first called.
from torch._compile import _disable_dynamo as untraced

# Used by many, but in private modules all the same.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Variable, profiler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

__all__ = [
    "FakeTensorMode",
    "StorageWeakRef",
    "TorchDispatchMode",
    "at_end_of_backward",
    "backward_id",
    "count_op_flops",
    "is_in_backward",
    "is_profiling",
    "is_view_op",
    "run_op",
    "storage_key",
    "storage_of",
    "tree_map",
    "untraced",
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


def run_op(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op. On fake tensors `_grouped_mm` takes bf16 only, though its kernels take fp32 too: go round that."""
    is_grouped_mm = func.overloadpacket.__name__ == "_grouped_mm"
    if not is_grouped_mm or not isinstance(args[0], FakeTensor) or {a.dtype for a in args[:2]} != {torch.float32}:
        return func(*args, **kwargs)
    return func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs).float()


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


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back once at the end of the backward that runs now, before what is queued after this."""
    Variable._execution_engine.queue_callback(callback)

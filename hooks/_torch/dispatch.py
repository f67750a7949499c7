"""The private names of the dispatcher, of fake tensors, of autograd and of the profiler."""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ReferenceType

import torch

# Widely used, but in private modules.
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode
from torch.autograd import Variable, profiler
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

untraced = torch._disable_dynamo  # type: ignore[attr-defined]
"""Keeps `torch.compile` out of a function. `torch.compiler.disable` would import torch._dynamo when it decorates."""


class FakeTensorMode(_FakeTensorMode):  # type: ignore[no-untyped-call]
    """Makes fake tensors whose address cannot be read. By default it is 0, to which a kernel of Triton would write."""

    def __init__(self, made: list[ReferenceType[torch.Tensor]] | None = None, **options: Any) -> None:
        """`made`: the mode appends a weak reference to each fake tensor that one of its ops returns."""
        super().__init__(**options)
        self._made = [] if made is None else made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op on fake tensors."""
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, FakeTensor):
                torch._C._set_throw_on_mutable_data_ptr(tensor)
                self._made.append(ReferenceType(tensor))
        return out


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key of a tensor's storage, unique among living storages. Views have the key of their base.

    The key is not the address of the data: FSDP2 frees and reallocates the data of an unsharded parameter, but retains
    the storage object.
    """
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)  # type: ignore[no-untyped-call]


def storage_of(tensor: torch.Tensor) -> StorageWeakRef | None:
    """Return a weak reference to a tensor's storage, fake or real. Views of one storage have equal references.

    The memory may be freed, but the address of the storage object is not reused while the reference lives. None for a
    layout that is not strided, which has no single storage.
    """
    if tensor.layout != torch.strided:
        return None
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_view_op(func: Any) -> bool:
    """Return whether an op returns a view of its input. `_unsafe_view` does, though its schema declares none."""
    return bool(func.is_view) or func.overloadpacket.__name__ == "_unsafe_view"


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether autograd tracks a tensor as a view of another one."""
    return tensor._base is not None


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor of which autograd tracks `tensor` as a view, None for other tensors."""
    return tensor._base


def without_base(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view as a tensor with the same memory and autograd history that is not a view.

    Only for a view whose base is referenced nowhere else. Other tensors are returned as they are.
    """
    if tensor._base is None:
        return tensor
    output: torch.Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
    return output


def is_part_of_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter or a view of one."""
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)


def needs_values(error: BaseException) -> bool:
    """Return whether a run on fake tensors raised `error` because it needs the value of a tensor."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


def run_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op, with the results of its kernels where those of fake tensors differ.

    Fake `_grouped_mm` accepts bf16 only, though its kernels accept others: it is run on bf16 casts. Fake `wait_tensor`
    makes another tensor, though its kernel returns its argument. The fake backward of group norm ignores the input's
    dtype if weights are fp32.
    """
    name = func.overloadpacket.__name__
    if name == "wait_tensor" and isinstance(args[0], FakeTensor):
        return args[0]
    if name == "_grouped_mm" and isinstance(args[0], FakeTensor) and args[0].dtype == args[1].dtype:
        return func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs).to(args[0].dtype)
    result = func(*args, **kwargs)
    if name == "native_group_norm_backward" and result[0] is not None:
        return (result[0].to(args[1].dtype), *result[1:])
    return result


def is_profiling() -> bool:
    """Return whether a torch profiler is recording: False in the waiting and warm-up steps of its schedule."""
    return profiler._is_profiler_enabled


def is_in_backward() -> bool:
    """Return whether autograd runs a backward in this thread. A forward that runs then is a recomputed one."""
    return backward_id() != -1


def backward_id() -> int:
    """Return the number of the backward that autograd runs in this thread, -1 if none. Each backward has its own."""
    return torch._C._current_graph_task_id()


def runs_autograd_node() -> bool:
    """Return whether autograd runs a node in this thread. At the end of a backward, in callbacks, it does not."""
    return torch._C._current_autograd_node() is not None


def accumulates_in(leaves: Iterable[torch.Tensor]) -> bool:
    """Return whether the running backward sets or adds to `grad` of any of these leaves. Call it in a tensor's hook.

    `torch.autograd.grad` sets no `grad`, and `backward(inputs=...)` only that of its inputs.
    """
    try:
        nodes = (torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves if leaf.requires_grad)
        return any(torch._C._will_engine_execute_node(node) for node in nodes)
    except RuntimeError as error:
        if "autograd.grad()" not in str(error):
            raise
        return False  # `torch.autograd.grad` with respect to one of the leaves is running


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once at the end of the running backward. Callbacks run in the order in which they are queued."""
    Variable._execution_engine.queue_callback(callback)

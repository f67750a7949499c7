"""Every name of torch's dispatch layer that lives in an underscore module, in one place.

Checked on torch 2.11.0, 2.13.0 and 2.15.0; `tests/hooks/test_private_names.py` fails when one is gone.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensorMode", "StorageWeakRef", "TorchDispatchMode", "is_view_op", "run_op", "storage_of"]


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

"""Registers autocast kernels for matrix products that torch's autocast does not cast.

Checked on torch 2.11, 2.13 and 2.15.

[Note: Products that autocast does not cast]
`torch._grouped_mm`, and so `F.grouped_mm` (torch 2.10 and newer), has no kernel at the dispatcher's autocast keys:
under autocast it multiplies its arguments in their own dtypes (pytorch issue 174763). `register` adds such a kernel.
The kernel casts the arguments as autocast does for its lower-precision ops, and calls the op with autocast disabled. A
registration applies to the whole process. So the kernel casts only in threads that have entered `casting`; in others it
leaves the arguments as they are. `torch.library.register_autocast` would cast in all threads. A dispatch mode could
cast too, but it would change the last bits of other ops and disable compilation.
"""

import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zeroamp.hooks._torch.dispatch import is_in_backward, is_view
from zeroamp.hooks.precision.autocast import further_casts

OPS = {"grouped_mm": ("aten::_grouped_mm", "transformers::grouped_mm_fallback")}
"""Name in a config -> the dispatcher's ops. transformers calls its own op where torch's op does not run: in compiled
blocks whose weights are not bf16, and on GPUs before SM80."""

_libraries: dict[tuple[str, str], torch.library.Library] = {}
"""(op, dispatch key) -> the library that registered the kernel. torch removes the kernel when the library is freed."""


class _Casts:
    """The ops whose arguments are cast in one `casting` context, and the cached casts."""

    def __init__(self, ops: frozenset[str]) -> None:
        self.ops = ops
        self.running: str | None = None
        """The op whose arguments are being cast."""
        self._copies: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def cast(self, value: Any, device_type: str) -> Any:
        """Cast an argument as autocast does: floating-point tensors of the device type, except fp64.

        As in autocast's own cache, leaves that need a gradient are cast once per context: gradients of several
        products are then added in the low dtype.
        """
        if not (isinstance(value, torch.Tensor) and value.device.type == device_type and value.is_floating_point()):
            return value
        dtype = torch.get_autocast_dtype(device_type)
        if value.dtype in (dtype, torch.float64):
            return value
        is_leaf = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not is_view(value)
        if not (is_leaf and torch.is_grad_enabled() and torch.is_autocast_cache_enabled()):
            return value.to(dtype)
        known, copy = self._copies.get(id(value), (None, None))
        if known is None or known() is not value or copy is None or copy.dtype != dtype:
            copy = value.to(dtype)
            self._copies[id(value)] = weakref.ref(value), copy
        return copy


_NONE = _Casts(frozenset())


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.casts = _NONE


_now = _PerThread()


def register(names: Collection[str], device_type: str) -> list[str]:
    """Register the kernels of the ops with these names (keys of `OPS`), each once per process.

    Return the names that torch's autocast already casts; no kernel is registered for them. Ops of packages that are not
    imported are skipped.
    """
    key = f"Autocast{device_type.upper()}"
    natively_cast = []
    for name in names:
        for op in OPS[name]:
            namespace, _, op_name = op.partition("::")
            packet = getattr(getattr(torch.ops, namespace), op_name, None)
            if (op, key) in _libraries or packet is None:
                continue
            if packet.default.has_kernel_for_dispatch_key(key):
                natively_cast.append(name)
                continue
            library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
            library.impl(op_name, _kernel(name, packet.default, device_type), key)  # type: ignore[no-untyped-call]
            _libraries[op, key] = library
    if _libraries and casting not in further_casts:
        further_casts.append(casting)
    return natively_cast


def _kernel(name: str, op: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        casts = _now.casts
        if name in casts.ops:
            casts.running = name
            try:
                args = tuple(casts.cast(value, device_type) for value in args)
                kwargs = {key: casts.cast(value, device_type) for key, value in kwargs.items()}
            finally:
                casts.running = None
        with torch.autocast(device_type, enabled=False):
            return op(*args, **kwargs)

    return run


@contextmanager
def casting(names: frozenset[str]) -> Iterator[None]:
    """Make autocast cast the arguments of these ops in this thread. An inner context replaces an outer one."""
    before, _now.casts = _now.casts, _Casts(names) if names else _NONE
    try:
        yield
    finally:
        _now.casts = before


def running_cast() -> str | None:
    """Return the name of the op whose arguments this thread is casting, or None."""
    return _now.casts.running


def casting_in_backward(ops: frozenset[str], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's forward that casts the arguments of these ops also when activation checkpointing repeats it.

    Checkpointing restores autocast, but not the `casting` context of the root's forward. Outside of a backward the
    forward is unchanged. Autograd runs backwards of accelerators in threads of its own, in which the forward's contexts
    are not active. The forward itself is wrapped, not hooked, so that a block that was compiled without the casts is
    compiled again.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        # A compiled program already contains the casts: it was traced inside the root's forward.
        if torch.compiler.is_compiling() or not is_in_backward():
            return forward(*args, **kwargs)
        with casting(ops):
            return forward(*args, **kwargs)

    return run

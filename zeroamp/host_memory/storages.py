"""`HostCopies`: copies storages to host memory and frees them on the device, so that every tensor stays valid.

[Note: Why storages]
A parameter, its shard, FSDP2's flat shard and a DTensor around it share one storage, and the optimizer's state is found
by the parameter's identity. So no tensor is replaced: the storage is resized to 0 bytes, as FSDP2 does with unsharded
parameters, and back. Reading a tensor in between would read freed memory, so callers refuse that.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import torch

from zeroamp.hooks._torch.dispatch import storage_key


class HostCopies:
    """The bytes of some storages, in host memory. Their device memory is free until `restore`."""

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        """Copy the storages of `tensors` that are on `device`, into pinned memory if it is an accelerator."""
        found = {storage_key(each): each for tensor in tensors for each in _plain_tensors(tensor)}
        tensors = [tensor for tensor in found.values() if tensor.device.type == device.type]
        is_pinned = device.type != "cpu"
        self._copies: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.resizable():  # on CPUs: memory of a file or of NumPy
                continue
            if storage.nbytes() == 0:  # other copies hold its bytes: `restore` would free what they have brought back
                continue
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_pinned)
            host.copy_(_bytes_of(storage), non_blocking=is_pinned)
            self._copies.append((storage, host))
        if is_pinned:
            torch.accelerator.synchronize(device)  # the copies end before their sources are freed
        for storage, _ in self._copies:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the storages again, and copy their bytes back on the current stream."""
        for storage, host in self._copies:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host, non_blocking=True)  # the pinned allocator keeps `host` until this has ended
        self._copies.clear()


offloaders: "WeakKeyDictionary[torch.optim.Optimizer, WeakMethod[Callable[[], None]]]" = WeakKeyDictionary()
"""Optimizer -> moves its state to host memory, with `zeroamp.offload_between_steps`."""


def put_state_away(optimizer: torch.optim.Optimizer) -> None:
    """Move offloaded state that was brought back to the device to host memory again."""
    if (found := offloaders.get(optimizer)) is not None and (offload := found()) is not None:
        offload()


def bring_state_back(optimizer: torch.optim.Optimizer) -> None:
    """Run the hooks of `optimizer.state_dict()`, which bring offloaded state to the device, before it is read."""
    with suppress(AttributeError):  # a wrapper that does not call `Optimizer.__init__` has no hooks
        optimizer.state_dict()


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors inside a tensor subclass: the shard of a DTensor, the codes and scales of a quantized one."""
    holder: Any = tensor
    if not hasattr(holder, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = holder.__tensor_flatten__()
    for inner in (getattr(holder, name) for name in names):
        if isinstance(inner, torch.Tensor):  # DTensor lists its mesh too
            yield from _plain_tensors(inner)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as a 1-D uint8 tensor in the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

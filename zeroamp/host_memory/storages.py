"""`HostCopies`: moves the memory of tensors to the host and back. At any time a tensor has all of its memory.

[Note: Why `data`]
A parameter, its shard, FSDP2's flat shard and a DTensor around it share one storage, and the optimizer's state is found
by the parameter's identity. So no tensor is replaced: `Tensor.data` of each plain tensor is set to a copy of the
storage, as `nn.Module.to` does. The copies are complete before the first tensor is set, so an error changes nothing.
Between `free` and `restore` a read or a write of a parameter, a gradient or the state is one in host memory.
A tensor that was not given, such as a view that the caller retains, still has the storage on the device. Then that
storage is not freed, and gets the bytes back.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch

from zeroamp.hooks._torch.dispatch import base_of, storage_key

Pair = tuple[torch.Tensor, torch.Tensor]
"""A plain tensor, and the same tensor in other memory."""


class HostCopies:
    """The bytes of some storages, in host memory. The tensors use them from `free` on, until `restore`."""

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        """Copy the storages of `tensors` that are on `device`, into pinned memory if it is an accelerator."""
        self._device = device
        found = {id(each): each for tensor in tensors for each in _plain_tensors(tensor)}
        self._tensors = [tensor for tensor in found.values() if tensor.device.type == device.type]
        self._origins: dict[int, tuple[torch.Tensor, ref[torch.UntypedStorage]]] = {}
        """Key of a storage in host memory -> its bytes, and the storage on the device if something else retains it."""
        self._pairs = self._copied(self._copied_to_host)

    def free(self) -> None:
        """Let the tensors use the copies. The storages on the device are freed."""
        _set_data(self._pairs)
        self._pairs = []

    def restore(self) -> None:
        """Copy the bytes to the device again, and let the tensors use that memory. An error changes nothing."""
        restore([self])

    def is_on_device(self) -> bool:
        """Return whether something else retains storages on the device, so that their memory is not free."""
        return any(origin() is not None for _, origin in self._origins.values())

    def _copied(self, copy: Callable[[torch.UntypedStorage, int], torch.Tensor | None]) -> list[Pair]:
        copies: dict[int, torch.Tensor | None] = {}
        pairs = []
        for tensor in self._tensors:
            if (key := storage_key(tensor)) not in copies:
                copies[key] = copy(tensor.untyped_storage(), key)
            if (copied := copies[key]) is not None:
                pairs.append((tensor, _same_view(copied, tensor)))
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)  # the copies end before their sources are freed
        return pairs

    def _copied_to_host(self, storage: torch.UntypedStorage, _key: int) -> torch.Tensor:
        is_pinned = self._device.type != "cpu"
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        host.copy_(_bytes_of(storage), non_blocking=is_pinned)
        self._origins[storage_key(host)] = host, ref(storage)
        return host

    def _copied_to_device(self, storage: torch.UntypedStorage, key: int) -> torch.Tensor | None:
        if key not in self._origins:  # of a tensor that the caller has moved since
            return None
        origin = self._origins[key][1]()
        if origin is None:
            copied = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self._device)
        else:
            copied = _bytes_of(origin)
        return copied.copy_(_bytes_of(storage), non_blocking=True)


def restore(all_copies: Sequence[HostCopies]) -> None:
    """Let the tensors of all copies use the device again. An error, such as a full memory, changes none of them."""
    found = [copies._copied(copies._copied_to_device) for copies in all_copies]
    for copies, pairs in zip(all_copies, found, strict=True):
        _set_data(pairs)
        copies._tensors, copies._origins = [], {}


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
        if (base := base_of(tensor)) is not None:  # retained by its view
            yield from _plain_tensors(base)
        return
    names, _ = holder.__tensor_flatten__()
    for inner in (getattr(holder, name) for name in names):
        if isinstance(inner, torch.Tensor):  # DTensor lists its mesh too
            yield from _plain_tensors(inner)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as a 1-D uint8 tensor in the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _same_view(copied: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like `tensor` in a copy of its storage."""
    view = torch.empty(0, dtype=tensor.dtype, device=copied.device)
    return view.set_(copied.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _set_data(pairs: Iterable[Pair]) -> None:
    for tensor, other in pairs:
        tensor.data = other  # of the tensor object, whose identity, gradient and hooks stay

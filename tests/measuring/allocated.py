"""Which storages are alive, by watching every op: what an allocator's counters say on an accelerator."""

import weakref
from unittest import mock

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_resize = torch.UntypedStorage.resize_


class Allocated(TorchDispatchMode):
    """Counts the bytes of the storages that were made while it is on, and remembers the most."""

    def __init__(self):
        super().__init__()
        self.now = 0
        self.peak = 0
        self._alive = {}
        """Key -> [bytes, weak reference]."""
        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", self._resized(_resize))

    def __enter__(self):
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, AsyncCollectiveTensor) or kind is DTensor for kind in types):
            return NotImplemented  # the ops on what they wrap are seen
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self.see(tensor)
        return result

    def see(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive and storage.device.type != "meta":
            reference = weakref.ref(storage, lambda _: self._add(-self._alive.pop(key)[0]))
            self._alive[key] = [storage.nbytes(), reference]
            self._add(storage.nbytes())

    def reset_peak(self):
        self.peak = self.now

    def _add(self, num_bytes):
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def _resized(self, resize):
        def resize_(storage, size):
            result = resize(storage, size)
            if (entry := self._alive.get(storage._cdata)) is not None:
                before, entry[0] = entry[0], storage.nbytes()
                self._add(entry[0] - before)
            return result

        return resize_


def _tensors(value):
    if isinstance(value, DTensor):
        value = value._local_tensor
    if isinstance(value, AsyncCollectiveTensor):
        value = value.elem
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)

"""Which storages are alive, by watching every op: what an allocator's counters say on an accelerator."""

import weakref
from collections import Counter
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
        self.at_peak = Counter()
        """(op, bytes) -> storages, at the last peak."""
        self._alive = {}
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
            self.see(tensor, str(func))
        return result

    def see(self, tensor, what):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive and storage.device.type != "meta":
            reference = weakref.ref(storage, lambda _: self._add(key, -self._alive.pop(key)[1]))
            self._alive[key] = [what, storage.nbytes(), reference]
            self._add(key, storage.nbytes())

    def reset_peak(self):
        self.peak, self.at_peak = 0, Counter()
        self._add(None, 0)

    def _add(self, _key, num_bytes):
        self.now += num_bytes
        if self.now > self.peak:
            self.peak = self.now
            alive = self._alive.copy()  # in one step: other threads release storages
            self.at_peak = {key: (what, size) for key, (what, size, _) in alive.items()}

    def largest_at_peak(self, number=40):
        return Counter(self.at_peak.values()).most_common(number)

    def _resized(self, resize):
        def resize_(storage, size):
            result = resize(storage, size)
            if (entry := self._alive.get(storage._cdata)) is not None:
                before, entry[1] = entry[1], storage.nbytes()
                self._add(storage._cdata, entry[1] - before)
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

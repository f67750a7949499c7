"""How much memory tensors made inside a block take together, at most."""

import time
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

GRACE_S = 2.0


class StoragePeak(TorchDispatchMode):
    """Counts the storages that ops inside return and that live on, except those that ops were given from outside.

    Above `limit` bytes it looks twice: gloo's threads let go of a collective's tensors a moment after it is done.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.num_bytes = 0
        """The peak."""
        self._limit = limit
        self._alive: dict[StorageWeakRef, int] = {}
        self._outside: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            if StorageWeakRef(storage) not in self._alive:
                self._outside.add(StorageWeakRef(storage))
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if (key := StorageWeakRef(storage)) not in self._outside:
                self._alive[key] = storage.nbytes()
        end = time.monotonic() + GRACE_S
        while (num_bytes := self._num_alive_bytes()) > self._limit and time.monotonic() < end:
            time.sleep(0.01)
        self.num_bytes = max(self.num_bytes, num_bytes)
        return result

    def _num_alive_bytes(self) -> int:
        self._alive = {key: size for key, size in self._alive.items() if not key.expired()}
        return sum(self._alive.values())


def _storages(values: Any) -> list[torch.UntypedStorage]:
    tensors = [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]
    # Of a wrapper, a DTensor or a tensor that waits for its collective, the one inside.
    return [getattr(t, "_local_tensor", getattr(t, "elem", t)).untyped_storage() for t in tensors]

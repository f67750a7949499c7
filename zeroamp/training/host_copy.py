"""`HostCopy`: copies numbers from the device to the host asynchronously."""

from collections.abc import Sequence
from typing import Any

import torch


class HostCopy:
    """Copies a 1-D tensor to the host. The host waits for the copy only when it reads the numbers."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Begin to copy. Do not change the tensor afterwards: a CPU tensor is copied only in `values`."""
        self._copied = tensor.to("cpu", non_blocking=True)  # into page-locked memory
        self._event: torch.Event | None = None
        if tensor.device.type != "cpu":
            self._event = torch.Event(tensor.device)
            self._event.record()
        self._values: list[float] | None = None

    def values(self) -> Sequence[float]:
        """Return the numbers. The first call waits for the copy, but not for work that was launched after it."""
        if self._values is None:
            if self._event is not None:
                self._event.synchronize()
            self._values = self._copied.tolist()
        return self._values

    def __reduce__(self) -> tuple[Any, ...]:
        """Support `pickle` and `copy` of step reports. Waits for the copy."""
        return HostCopy, (torch.tensor(self.values(), dtype=torch.float64),)

"""`HostCopy`: numbers of a device, on their way to the host."""

from collections.abc import Sequence
from typing import Any

import torch


class HostCopy:
    """A copy of a 1-D tensor to the host, which the host waits for only when it reads the numbers."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Begin to copy. The tensor must not be changed afterwards: on a CPU nothing is copied before `values`."""
        self._copied = tensor.to("cpu", non_blocking=True)  # into page-locked memory
        self._event: torch.Event | None = None
        if tensor.device.type != "cpu":
            self._event = torch.Event(tensor.device)
            self._event.record()
        self._values: list[float] | None = None

    def values(self) -> Sequence[float]:
        """Return the numbers. The first call waits for the copy, not for what the device was given after it."""
        if self._values is None:
            if self._event is not None:
                self._event.synchronize()
            self._values = self._copied.tolist()
        return self._values

    def __reduce__(self) -> tuple[Any, ...]:
        """Let step reports be pickled and copied: waits for the copy."""
        return HostCopy, (torch.tensor(self.values(), dtype=torch.float64),)

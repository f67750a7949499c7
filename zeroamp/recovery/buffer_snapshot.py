"""Copies a model's buffers when an optimizer step begins, and restores them if the step fails.

After a failure, the other ranks continue the step with zeros instead of the failed rank's data. Without the restore,
running statistics such as BatchNorm's would be wrong from then on.
"""

from collections.abc import Iterator

import torch
from torch import nn


class BufferSnapshot:
    """Copies of all buffers of the modules that have buffers now. They take as much memory as the buffers."""

    def __init__(self, root: nn.Module) -> None:
        self._modules = [module for module in root.modules() if module._buffers]
        self._taken: dict[tuple[nn.Module, str], torch.Tensor | None] = {}
        self._copies: dict[tuple[nn.Module, str], torch.Tensor] = {}

    def take(self) -> None:
        """Copy all buffers on their device, without waiting for it.

        Buffers with an unchanged `_version` are copied too: BatchNorm's kernels do not increment it.
        """
        before, self._taken = self._taken, dict(self._present())
        buffers = {key: buffer.detach() for key, buffer in self._taken.items() if buffer is not None}
        self._copies = {
            key: self._copies[key] if before.get(key) is self._taken[key] else torch.empty_like(buffer)
            for key, buffer in buffers.items()
        }
        if buffers:
            torch._foreach_copy_(list(self._copies.values()), list(buffers.values()))

    def restore(self) -> None:
        """Restore the buffers of the last `take`, and remove buffers that were added since."""
        for module, name in [key for key, _ in self._present() if key not in self._taken]:
            del module._buffers[name]
        for (module, name), buffer in self._taken.items():
            module._buffers[name] = buffer
            if buffer is not None:
                buffer.detach().copy_(self._copies[module, name])

    def _present(self) -> Iterator[tuple[tuple[nn.Module, str], torch.Tensor | None]]:
        for module in self._modules:
            for name, buffer in module._buffers.items():
                yield (module, name), buffer

"""`save_on_cpu`: activations are in host memory from the forward to the backward, and weights are not."""

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from zeroamp.hooks._torch.dispatch import is_part_of_parameter


def save_on_cpu(*, pin_memory: bool = False, device_type: str = "cuda") -> saved_tensors_hooks:
    """Return a context for the forward: what autograd saves for the backward is copied to host memory.

    As `torch.autograd.graph.save_on_cpu`, which copies the unsharded weights of the forward too. Here a parameter and
    views of it stay as they are: FSDP2 frees their memory, and all-gathers them again for the backward. The bits are
    those without it.

    ```python
    with zeroamp.save_on_cpu(pin_memory=True):
        loss = model(**batch).loss
    train.backward(loss)
    ```

    Args:
        pin_memory: whether the copies are in pinned memory, and run asynchronously.
        device_type: as for `torch.autograd.graph.save_on_cpu`.
    """
    moves = torch.autograd.graph.save_on_cpu(pin_memory=pin_memory, device_type=device_type)

    def pack(tensor: torch.Tensor) -> object:
        return tensor if is_part_of_parameter(tensor) else (moves.pack_hook(tensor),)

    def unpack(packed: Any) -> torch.Tensor:
        tensor: torch.Tensor = moves.unpack_hook(packed[0]) if isinstance(packed, tuple) else packed
        return tensor

    return saved_tensors_hooks(pack, unpack)

"""`deepspeed.runtime.utils`: `see_memory_usage`, which many of DeepSpeed's examples import, and two small functions."""

from typing import Any

import torch
import torch.distributed as dist

from zeroamp.deepspeed.accelerator import get_accelerator
from zeroamp.deepspeed.refused import missing
from zeroamp.deepspeed.utils import logger
from zeroamp.hooks.tensors import map_tensors

_GIB = 1024**3


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the device's memory now and at its peak, in GiB, on the first rank. Does nothing unless `force` is True."""
    if not force or (dist.is_initialized() and dist.get_rank() > 0):
        return
    device = get_accelerator()
    logger.info(
        "%s: allocated %.2f GiB, peak %.2f GiB; reserved %.2f GiB, peak %.2f GiB",
        message,
        device.memory_allocated() / _GIB,
        device.max_memory_allocated() / _GIB,
        device.memory_reserved() / _GIB,
        device.max_memory_reserved() / _GIB,
    )


def set_random_seed(seed: int) -> None:
    """Seed torch's generators."""
    torch.manual_seed(seed)


def move_to_device(item: Any, device: Any) -> Any:
    """Return a container with its tensors on a device."""
    return map_tensors(lambda tensor: tensor.to(device), item)


def __getattr__(name: str) -> object:
    return missing(__name__, name, ("move_to_device", "see_memory_usage", "set_random_seed"))

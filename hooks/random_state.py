"""The global random generators of one rank: torch's on the CPU and on the accelerator, Python's and NumPy's."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_CPU = torch.device("cpu")


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of every generator, as tensors and plain values. Of accelerators, only `device` is included."""
    name, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *rest),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore a state that `random_state` returned. Without a state of `device.type`, the accelerator's stays."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)


@contextmanager
def preserved_random_state(device_type: str) -> Iterator[None]:
    """Restore the state of every generator when the context ends, including all devices of `device_type`."""
    state, accelerator = random_state(_CPU), torch.get_device_module(device_type)
    # Reading the state of an accelerator that was never used would initialise it.
    on_devices = accelerator.get_rng_state_all() if device_type != "cpu" and accelerator.is_initialized() else None
    try:
        yield
    finally:
        set_random_state(state, _CPU)
        if on_devices is not None:
            accelerator.set_rng_state_all(on_devices)

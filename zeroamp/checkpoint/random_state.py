"""The random generators of one rank: torch's on the CPU and on the accelerator, Python's and NumPy's."""

import random
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of every global generator, of tensors and plain values only."""
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
    """Put back what `random_state` returned. An accelerator of another type than it was taken on keeps its own."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)

"""`get_accelerator()`: this machine's accelerator, or the CPU, with the methods of DeepSpeed's."""

from functools import cache
from typing import Any

import torch

from zeroamp.deepspeed.refused import unknown
from zeroamp.planning.mesh import current_device_type

__path__: list[str] = []  # a package: `submodules` imports `accelerator.real_accelerator`


class Accelerator:
    """The device type of this machine, "cpu" or such as "cuda". Other attributes are those of torch's device module.

    On the CPU, attributes that torch.cpu does not have are those of torch (`manual_seed`, `get_rng_state`), and numbers
    of bytes are 0.
    """

    def __init__(self) -> None:
        self._name = current_device_type()
        self._on_cpu = self._name == "cpu"
        self._module: Any = torch.cpu if self._on_cpu else torch.get_device_module(self._name)

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cpu", "cuda", or "cuda:<index>"."""
        return self._name if device_index is None or self._on_cpu else f"{self._name}:{device_index}"

    def set_device(self, device_index: int) -> None:
        """Choose this process's device. Does nothing on the CPU."""
        if not self._on_cpu:
            torch.accelerator.set_device_index(device_index)

    def current_device_name(self) -> str:
        """Return the name of this process's device."""
        return "cpu" if self._on_cpu else f"{self._name}:{torch.accelerator.current_device_index()}"

    def communication_backend_name(self) -> str:
        """Return the backend of collectives: "gloo" on the CPU."""
        return torch.distributed.get_default_backend_for_device(self._name)

    def is_bf16_supported(self) -> bool:
        """Return whether the device computes in bf16."""
        return True if self._on_cpu else bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Return whether the device computes in fp16."""
        return True

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's generators, those of all devices included."""
        torch.manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._on_cpu and name in ("empty_cache", "reset_peak_memory_stats"):
            return lambda *_: None
        if self._on_cpu and name.removeprefix("max_") in ("memory_allocated", "memory_reserved"):
            return lambda *_: 0
        for module in (self._module, torch) if self._on_cpu else (self._module,):
            if (found := getattr(module, name, None)) is not None:  # Stream, Event, device_count, synchronize
                return found
        raise unknown("The accelerator", name, (each for each in dir(type(self)) if not each.startswith("_")))


@cache
def get_accelerator() -> Accelerator:
    """Return the accelerator of this machine, or the CPU. It is the same object at each call."""
    return Accelerator()

"""`get_accelerator()`: this machine's accelerator, or the CPU, with the methods of DeepSpeed's."""

from functools import cache
from typing import Any

import torch

from zeroamp.deepspeed.refused import unknown
from zeroamp.planning.mesh import current_device_type

__path__: list[str] = []  # a package: `submodules` imports `accelerator.real_accelerator`

Index = int | None


_ON_CPU: dict[str, int | None] = {
    "empty_cache": None,
    "reset_peak_memory_stats": None,
    "memory_allocated": 0,
    "max_memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_reserved": 0,
}
"""Functions of torch.cuda that torch.cpu lacks -> what they return on the CPU."""


class Accelerator:
    """The device type of this machine, "cpu" or such as "cuda". Other attributes are those of torch's device module."""

    def __init__(self) -> None:
        self._name = current_device_type()
        self._on_cpu = self._name == "cpu"
        self._module: Any = torch.cpu if self._on_cpu else torch.get_device_module(self._name)

    def device_name(self, device_index: Index = None) -> str:
        """Return "cpu", "cuda", or "cuda:<index>"."""
        return self._name if device_index is None or self._on_cpu else f"{self._name}:{device_index}"

    def device(self, device_index: Index = None) -> torch.device:
        """Return the device with an index; None: without index."""
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        """Choose this process's device. Does nothing on the CPU."""
        if not self._on_cpu:
            torch.accelerator.set_device_index(device_index)

    def current_device(self) -> int | str:
        """Return the index of this process's device; "cpu" on the CPU."""
        return "cpu" if self._on_cpu else torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        """Return the name of this process's device."""
        return "cpu" if self._on_cpu else f"{self._name}:{torch.accelerator.current_device_index()}"

    def device_count(self) -> int:
        """Return the number of devices; on the CPU, 1."""
        return 1 if self._on_cpu else torch.accelerator.device_count()

    def is_available(self) -> bool:
        """Return True: there is always a device, if only the CPU."""
        return True

    def is_synchronized_device(self) -> bool:
        """Return whether calls return when their work is done: True on the CPU."""
        return self._on_cpu

    def synchronize(self, device_index: Index = None) -> None:
        """Wait for the device."""
        if not self._on_cpu:
            torch.accelerator.synchronize(device_index)

    def communication_backend_name(self) -> str:
        """Return the backend of collectives: "gloo" on the CPU."""
        return torch.distributed.get_default_backend_for_device(self._name)

    def is_bf16_supported(self) -> bool:
        """Return whether the device computes in bf16."""
        return True if self._on_cpu else bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Return whether the device computes in fp16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return fp32 and the low precisions."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on this kind of device."""
        return tensor.device.type == self._name

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the device."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def random(self) -> Any:
        """Return the module torch.random."""
        return torch.random

    def get_rng_state(self, device_index: Index = None) -> torch.Tensor:
        """Return the state of the device's generator."""
        if self._on_cpu:
            return torch.get_rng_state()
        state: torch.Tensor = self._module.get_rng_state(*([] if device_index is None else [device_index]))
        return state

    def set_rng_state(self, new_state: torch.Tensor, device_index: Index = None) -> None:
        """Restore the state of the device's generator."""
        if self._on_cpu:
            torch.set_rng_state(new_state)
        else:
            self._module.set_rng_state(new_state, *([] if device_index is None else [device_index]))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._on_cpu and name in _ON_CPU:
            return lambda *_, **__: _ON_CPU[name]
        if (found := getattr(self._module, name, None)) is not None:  # Stream, Event, current_stream
            return found
        raise unknown("The accelerator", name, (each for each in dir(type(self)) if not each.startswith("_")))


@cache
def get_accelerator() -> Accelerator:
    """Return the accelerator of this machine, or the CPU. It is the same object at each call."""
    return Accelerator()

"""Faults that `--plant NAME` plants, to show that a part finds them. No fault is planted by default.

The name is read from an environment variable, so that the processes that a part starts have it too.
"""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

import zeroamp

VARIABLE = "ZEROAMP_GPU_CHECK_FAULT"


def _wrong_bit(parameters: dict[str, torch.Tensor]) -> None:
    """Change one element of one parameter."""
    first = next(iter(parameters.values()))
    with torch.no_grad():
        getattr(first, "_local_tensor", first).view(-1)[0].mul_(1.5).add_(1)


def _host_read(loss: torch.Tensor) -> None:
    loss.item()


def _hold_memory(device: torch.device, num_bytes: int) -> None:
    """Hold `num_bytes` more bytes during each backward."""
    backward = zeroamp.TrainStep.backward

    def holding(train: zeroamp.TrainStep, loss: torch.Tensor) -> None:
        held = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        backward(train, loss)
        del held

    zeroamp.TrainStep.backward = holding  # type: ignore[method-assign, assignment]


def _other_order(rows: torch.Tensor, output: torch.Tensor, divide_by: float) -> None:
    """Add the rows one after the other, which is not the order of the tree."""
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row
    output.copy_(total / divide_by)


def _no_update() -> None:
    """Let each optimizer step discard its gradients."""
    zeroamp.TrainStep.step = zeroamp.TrainStep.zero_grad  # type: ignore[assignment]


def _no_waits() -> None:
    """Let no stream wait for another one. This has an effect on CUDA only: a CPU has no streams."""
    torch.cuda.Stream.wait_stream = torch.cuda.Stream.wait_event = lambda *_: None  # type: ignore[method-assign]


def _context_on_gpu_0(gpus: list[int], device: torch.device) -> None:
    """Open a context on GPU 0, as a thread that chooses no device does. Without a GPU, note it."""
    if device.type == "cuda":
        torch.zeros(1, device="cuda:0")
    gpus[:] = sorted({0, *gpus})


FAULTS: dict[str, Callable[..., None]] = {
    "wrong bit": _wrong_bit,
    "wrong bit when disturbed": _wrong_bit,
    "host read": _host_read,
    "host read in step": _host_read,
    "memory": _hold_memory,
    "order of the sum": _other_order,
    "no update": _no_update,
    "streams do not wait": _no_waits,
    "hang": lambda: time.sleep(10_000),
    "crash": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "context on GPU 0": _context_on_gpu_0,
    "one level": lambda config: config["zeroamp"].update(ranks_per_node="off"),
    "a rank ends": lambda: os._exit(3),
}


def planted(name: str, *args: Any) -> bool:
    """Plant the fault `name` here if `--plant` names it. Return whether it was planted."""
    if name not in FAULTS:
        raise AssertionError(f"expected one of {', '.join(FAULTS)}, got {name!r}")
    if os.environ.get(VARIABLE) != name:
        return False
    FAULTS[name](*args)
    return True

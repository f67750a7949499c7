"""Sets up this process as a rank: its device and process group."""

import os

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.peers.options import Options


def start(options: Options) -> torch.device:
    """Join the process group and return the device. Without torchrun this process is the only rank."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if options.fake:
        dist.init_process_group("fake", rank=0, world_size=options.world_size, store=FakeStore())
    elif "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    return device


def backend_name(device: torch.device, options: Options) -> str:
    """Return the name of the backend, in words."""
    if options.fake:
        return "a process group that moves nothing"
    return "gloo" if device.type == "cpu" else "NCCL"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

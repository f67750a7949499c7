"""Chooses this rank's accelerator before the first collective."""

import os

import torch
import torch.distributed as dist

from zeroamp.policies.errors import WrapError
from zeroamp.policies.numbers import counted

_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def choose_device(device_type: str) -> None:
    """Make this rank's accelerator the current device, unless the process has used or chosen one already.

    The launcher's local rank is the index of the device. Without one it is the rank modulo the number of devices. A
    process that sees one device uses that. `torch.distributed.device_mesh` chooses the same way, but only when it makes
    a mesh: with NCCL, an earlier collective would put all ranks on device 0.

    Raises:
        WrapError: there is no device of this local rank.
    """
    if device_type == "cpu" or torch.get_device_module(device_type).is_initialized():
        return
    if dist.is_initialized() and dist.get_backend() == "fake":
        return
    num_devices = torch.accelerator.device_count()
    name = next((each for each in _LOCAL_RANKS if os.environ.get(each, "").isdecimal()), None)
    if num_devices == 1:
        index = 0
    elif name is not None:
        index = int(os.environ[name])
    else:
        index = dist.get_rank() % num_devices if dist.is_initialized() and num_devices else 0
    if index >= num_devices:
        raise WrapError(
            f"{name} is {index}, but this process sees {counted(num_devices, 'device')} of type {device_type}. "
            "Start at most one rank per device, or call torch.accelerator.set_device_index before wrap_model."
        )
    torch.accelerator.set_device_index(index)

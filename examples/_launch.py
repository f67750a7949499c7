"""Starts the process group: of torchrun's ranks, also after restarts, or of one process."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

# A collective fails after this time, because another rank is lost. Loading and the first step take much less.
COLLECTIVE_TIMEOUT = timedelta(minutes=5)
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def start_process_group(timeout: timedelta = COLLECTIVE_TIMEOUT) -> torch.device:
    """Start the process group from torchrun's environment, or one of a single process. Return this rank's device.

    A collective fails after `timeout`.
    """
    if "RANK" not in os.environ:
        os.environ.update(ALONE)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    start = partial(
        dist.init_process_group,
        store=dist.PrefixStore(_name_of_start(world_size), store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    if not torch.cuda.is_available():
        start("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # gloo beside NCCL, for tensors on the CPU.
    start("cpu:gloo,cuda:nccl", device_id=device)
    return device


def _name_of_start(world_size: int) -> str:
    """Return a name for this start, so that ranks do not read the addresses of the last start in the store.

    torchrun uses one store for all restarts by default (pytorch/pytorch issue 135712). Its count of restarts is the
    same on all ranks of one machine only.
    """
    environment = os.environ.get
    is_kept = environment("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_kept and world_size == int(environment("LOCAL_WORLD_SIZE") or "0"):
        return f"start_{environment('TORCHELASTIC_RESTART_COUNT', '0')}"
    if is_kept and environment("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise SystemExit(
            "Restarts on several machines need a new store for each start, but torchrun shares one. Start torchrun "
            "with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment."
        )
    return "start"

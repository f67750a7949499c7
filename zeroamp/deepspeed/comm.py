"""`deepspeed.comm`: the functions of torch.distributed, with torch's arguments, and DeepSpeed's `init_distributed`."""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zeroamp.deepspeed.refused import missing, reason_of
from zeroamp.planning.mesh import current_device_type, start_process_group
from zeroamp.planning.rank_device import choose_device

__path__: list[str] = []  # a package: `submodules` imports `comm.comm`


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialise torch's default process group, unless there is one. Chooses the rank's accelerator first.

    `auto_mpi_discovery`, `verbose`, `dist_init_required` and `config` have no effect.

    Args:
        dist_backend: backend of `torch.distributed.init_process_group`. None: torch's default for this machine.
        distributed_port: MASTER_PORT, if the environment has a rank but no port.
        timeout: of the collectives.
        init_method: a URL.
        rank: rank of this process, with `world_size`. -1: from the environment.
        world_size: the number of processes.

    Raises:
        WrapError: `start_process_group` raises it.
    """
    del auto_mpi_discovery, verbose, dist_init_required, config
    if dist.is_initialized():
        return
    named: dict[str, Any] = {"backend": dist_backend, "timeout": timeout, "init_method": init_method}
    given = {name: value for name, value in named.items() if value is not None}
    if rank >= 0:
        given |= {"rank": rank, "world_size": world_size}
    if "RANK" in os.environ:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    elif rank < 0:
        start_process_group()  # a world of one, or an error that names the launcher
        return
    choose_device(current_device_type())
    dist.init_process_group(**given)


def get_local_rank() -> int:
    """Return LOCAL_RANK of the environment, or 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and hasattr(dist, name) and reason_of(f"comm.{name}") is None:
        return getattr(dist, name)
    return missing(__name__, name, dir(dist))

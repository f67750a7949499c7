"""Prints zeroamp's messages once per job, and without a logging configuration of the user.

All modules log to the logger "zeroamp". A record that belongs to its rank, such as that of DeepSpeed's `log_dist`, is
logged by a child of it, and is printed on every rank.
"""

import logging

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("zeroamp")

_first_ranks = {0}
"""The first rank of the job, and that of the mesh on which this process wrapped its last model."""


def log_once_per_job(mesh: DeviceMesh | None = None) -> None:
    """Let only the first rank of the job, and that of `mesh`, log. Print to stderr if no logging is configured.

    What the user configured is not changed: no handler is added if the logger "zeroamp" or the root logger has one, and
    no level is set if one of them has one.
    """
    _first_ranks.clear()
    _first_ranks.update((0,) if mesh is None else (0, int(mesh.mesh.flatten()[0])))
    logger.addFilter(_is_on_first_rank)  # no effect if it was added before
    if not logger.hasHandlers():
        handler = _WithoutConfiguration()
        handler.setFormatter(logging.Formatter("[zeroamp] %(levelname)s: %(message)s"))
        logger.addHandler(handler)
        if logger.level == logging.NOTSET and logging.getLogger().level == logging.WARNING:  # Python's own level
            logger.setLevel(logging.INFO)


def _is_on_first_rank(_record: logging.LogRecord) -> bool:
    return not dist.is_initialized() or dist.get_rank() in _first_ranks


class _WithoutConfiguration(logging.StreamHandler):  # type: ignore[type-arg]  # it is generic for type checkers only
    """Prints to stderr, until the user adds a handler: that one then prints the message, and this one does not."""

    def handle(self, record: logging.LogRecord) -> bool:
        is_alone = logger.handlers == [self] and not logging.getLogger().handlers
        return is_alone and bool(super().handle(record))

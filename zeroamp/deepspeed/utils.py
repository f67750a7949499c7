"""`deepspeed.utils` and `runtime.utils`: logging, memory, and leaf modules."""

from collections.abc import Sequence
from logging import INFO, getLogger  # not the module: the submodule `utils.logging` has its name
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroamp.deepspeed.accelerator import get_accelerator
from zeroamp.deepspeed.refused import missing
from zeroamp.policies.errors import StepError

__path__: list[str] = []  # a package: `submodules` imports `utils.timer` and others

logger = getLogger("zeroamp.deepspeed")
"""For the script's messages: as in DeepSpeed, they are printed on every rank that logs them."""

_LEAF = "_z3_leaf"  # attribute that marks a module as one unit without units inside
_GIB = 1024**3
_PUBLIC = ("see", "set", "log")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = INFO) -> None:
    """Log a message on the given ranks. None or -1: on all ranks."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    if not ranks or -1 in ranks or rank in ranks or rank == -1:
        logger.log(level, "[Rank %d] %s", rank, message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the device's memory now and at its peak, in GiB, on the first rank. Does nothing unless `force` is True."""
    if not force or (dist.is_initialized() and dist.get_rank() > 0):
        return
    device = get_accelerator()
    logger.info(
        "%s: allocated %.2f GiB, peak %.2f GiB; reserved %.2f GiB, peak %.2f GiB",
        message,
        device.memory_allocated() / _GIB,
        device.max_memory_allocated() / _GIB,
        device.memory_reserved() / _GIB,
        device.max_memory_reserved() / _GIB,
    )


def set_random_seed(seed: int) -> None:
    """Seed torch's generators."""
    torch.manual_seed(seed)


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type | str]) -> list[nn.Module]:
    """Mark the modules of these classes, given by class or by name, and return them. Call it before `initialize`.

    `initialize` then makes each of them one unit, without units inside.

    Raises:
        StepError: no module is of such a class.
    """
    names = {each if isinstance(each, str) else each.__name__ for each in leaf_module_classes}
    found = [module for module in model.modules() if names & {each.__name__ for each in type(module).__mro__}]
    if not found:
        raise StepError(
            f"set_z3_leaf_modules found no module of {', '.join(sorted(names))} in {type(model).__name__}. Pass "
            "classes of its modules."
        )
    for module in found:
        setattr(module, _LEAF, True)
    return found


def leaf_names(model: nn.Module) -> list[str]:
    """Return the FQNs of the modules that `set_z3_leaf_modules` has marked."""
    return [fqn for fqn, module in model.named_modules() if getattr(module, _LEAF, False)]


def __getattr__(name: str) -> Any:
    return missing(__name__, name, [each for each in globals() if each.startswith(_PUBLIC)])

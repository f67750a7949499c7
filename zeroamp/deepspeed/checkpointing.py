"""`deepspeed.checkpointing`: activation checkpointing, by torch's `checkpoint` without reentrant autograd."""

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zeroamp.deepspeed.refused import missing, refusal

_settings: dict[str, bool] = {"is_configured": False}


def configure(
    mpu_: object = None,
    deepspeed_config: object = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Accept settings of activation checkpointing that have no effect on `checkpoint`, and refuse all others.

    Raises:
        UnsupportedError: `mpu_` is given, or an option is switched on.
    """
    del deepspeed_config, num_checkpoints
    switched = {
        "mpu_": mpu_ is not None,
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    for name, is_on in switched.items():
        if is_on:
            raise refusal(
                f"checkpointing.configure({name}=)", "Leave it out: activations stay on their rank and device."
            )
    _settings["is_configured"] = True


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _settings["is_configured"]


def reset() -> None:
    """Do nothing: there are no buffers between steps."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)` without saving its activations, and recompute them in the backward."""
    return torch_checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


def __getattr__(name: str) -> Any:
    return missing(__name__, name, ("checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"))

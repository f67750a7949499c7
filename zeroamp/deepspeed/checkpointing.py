"""`deepspeed.checkpointing`: activation checkpointing, by torch's `checkpoint` without reentrant autograd."""

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zeroamp.deepspeed.refused import missing, refusal

_settings: dict[str, Any] = {}


def configure(mpu_: object = None, deepspeed_config: object = None, **options: object) -> None:
    """Accept `num_checkpoints` and options that are off, which have no effect, and refuse all others.

    Raises:
        UnsupportedError: `mpu_` is given, or an option is switched on.
    """
    for name, value in {"mpu_": mpu_, **options}.items():
        if value and name != "num_checkpoints":
            raise refusal(f"checkpointing.configure({name}=)", "Leave it out: activations stay on their device.")
    _settings["config"] = deepspeed_config


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return bool(_settings)


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)` without saving its activations, and recompute them in the backward."""
    return torch_checkpoint(function, *args, use_reentrant=False)


def __getattr__(name: str) -> Any:
    return missing(__name__, name, ("checkpoint", "configure", "is_configured"))

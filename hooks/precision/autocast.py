"""Runs the root's forward under the config's `torch.autocast`, and checks an autocast of the caller around it.

| config | the caller's autocast around the forward | result |
|---|---|---|
| torch_autocast | the same dtype | no message |
| torch_autocast | another dtype, or `enabled=False` | one warning per model; the config's autocast is used |
| fp32, bf16 or fp16 | on | PrecisionError, unless `zeroamp.external_autocast` is "allow" |

Only autocast of the model's device type is checked. Autocast contexts inside the model's forward are not checked.

[Note: Cached casts]
`torch.autocast` casts a weight once and caches the result until the outermost autocast of the thread ends. Several
forwards inside one autocast of the caller share the casts, and so the sums of their gradients in low precision, as in
plain torch. Two things differ from plain torch. After an optimizer's step the cache is cleared
(`zeroamp/wrapping/optimizer_hooks.py`): otherwise the next forward would read casts of the old weights. And a forward
without gradients caches nothing: otherwise the next one would give no gradient to the weights that it cast.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from zeroamp.hooks.root_forward import ForwardCall, ForwardContext
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import PrecisionError

logger = logging.getLogger("zeroamp")

_OTHER_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps")


def enter_autocast(device_type: str, dtype: torch.dtype) -> ForwardContext:
    """Return a `ForwardContext` that runs a forward under the config's autocast: place "autocast" of `RootForward`."""
    return lambda _call: torch.autocast(device_type, dtype=dtype)


def cache_with_gradients(_call: ForwardCall) -> AbstractContextManager[None] | None:
    """Return the context of a forward without gradients, in which autocast caches nothing: see [Note: Cached casts].

    For the place "outer autocast" of `RootForward`, in every mode.
    """
    return None if torch.is_grad_enabled() else _without_cache()


@contextmanager
def _without_cache() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def warn_of_other_autocast(device_type: str, dtype: torch.dtype) -> ForwardContext:
    """Return a `ForwardContext` that logs one warning if the caller's autocast differs from the config's."""
    has_warned = False

    def look(call: ForwardCall) -> None:
        nonlocal has_warned
        if call.is_outermost and not has_warned:
            has_warned = _warn_if_different(device_type, dtype)

    return look


def refuse_autocast(device_type: str, mode: str) -> ForwardContext:
    """Return a `ForwardContext` that raises a PrecisionError if the caller has autocast on and the config has not."""

    def look(_call: ForwardCall) -> None:
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            raise PrecisionError(
                f"The model's forward was called inside torch.autocast({device_type!r}, dtype={dtype}), but the config "
                f"sets {mode} precision. Remove the autocast around the forward. To train with autocast, write "
                f'"torch_autocast": {{"enabled": true, "dtype": "{short_name(dtype)}"}} in the config. To allow an '
                'autocast of your own, write "zeroamp": {"external_autocast": "allow"}.'
            )

    return look


def _warn_if_different(device_type: str, dtype: torch.dtype) -> bool:
    """Log a warning if the caller's autocast differs from the config's; return whether one was logged."""
    if torch.is_autocast_enabled(device_type):
        found = torch.get_autocast_dtype(device_type)
        if found == dtype:
            return False
        words = f"torch.autocast({device_type!r}, dtype={found})"
    elif _is_inside_disabled(device_type):
        words = f"torch.autocast({device_type!r}, enabled=False)"
    else:
        return False
    logger.warning(
        "The model's forward was called inside %s, but torch_autocast.dtype is %s in the config. The model runs under "
        "the config's autocast. Remove the autocast around the forward.",
        *(words, short_name(dtype)),
    )
    return True


def _is_inside_disabled(device_type: str) -> bool:
    """Return whether an autocast with `enabled=False` is active. Only the nesting depth differs from no autocast."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    others = [name for name in _OTHER_DEVICE_TYPES if name != device_type and torch.amp.is_autocast_available(name)]
    return depth > 0 and not any(torch.is_autocast_enabled(name) for name in others)

"""`torch.autocast` around the root's forward: the config's own, and how the caller's is handled.

| config | the caller's autocast around the forward | result |
|---|---|---|
| torch_autocast | the same dtype | nothing |
| torch_autocast | another dtype, or `enabled=False` | one warning per model; the config's is used |
| fp32, bf16 or fp16 | on | PrecisionError, unless `zeroamp.external_autocast` is "allow" |

Only autocast of the model's device type is checked. Autocast contexts inside the model's forward are not checked.

[Note: Cached casts]
`torch.autocast` casts a weight once and caches the result until the outermost autocast of the thread is left. Inside an
autocast of the caller that spans several steps, a forward would read casts of weights from before the update. So each
outermost forward begins with an empty cache, as if the caller's autocast had been entered just before it.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from zeroamp.hooks._torch.autocast_ops import casting, is_any_registered
from zeroamp.hooks.root_forward import Around, ForwardCall
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import PrecisionError

logger = logging.getLogger("zeroamp")

_OTHER_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps")


def config_autocast(
    device_type: str, dtype: torch.dtype, ops: frozenset[str] = frozenset()
) -> AbstractContextManager[object]:
    """Return the autocast of a config: `torch.autocast`, which also casts the arguments of `ops` inside.

    `ops` are names of `zeroamp.autocast_ops`, and must be registered. Without them, and where no other model of the
    process has any, this is `torch.autocast` itself.
    """
    autocast = torch.autocast(device_type, dtype=dtype)
    return _with_casts(autocast, ops) if ops or is_any_registered() else autocast


@contextmanager
def _with_casts(autocast: torch.autocast, ops: frozenset[str]) -> Iterator[None]:
    with autocast, casting(ops):
        yield


def enter_autocast(device_type: str, dtype: torch.dtype, ops: frozenset[str] = frozenset()) -> Around:
    """Return what runs a forward under `config_autocast`, for the place "autocast" of `RootForward`."""
    return lambda _call: config_autocast(device_type, dtype, ops)


def forget_casts(call: ForwardCall) -> None:
    """Discard the casts that autocast has cached, before an outermost forward: see [Note: Cached casts].

    For the place "outer autocast" of `RootForward`, in every mode.
    """
    if call.is_outermost:
        torch.clear_autocast_cache()


def warn_of_other_autocast(device_type: str, dtype: torch.dtype) -> Around:
    """Return what logs one warning if the caller's autocast around a forward is not the config's."""
    has_warned = False

    def look(call: ForwardCall) -> None:
        nonlocal has_warned
        if call.is_outermost and not has_warned:
            has_warned = _warn_if_different(device_type, dtype)

    return look


def refuse_autocast(device_type: str, mode: str) -> Around:
    """Return what raises PrecisionError before a forward inside the caller's autocast, for a config without one."""

    def look(_call: ForwardCall) -> None:
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            raise PrecisionError(
                f"The model's forward was called inside torch.autocast({device_type!r}, dtype={dtype}), but the config "
                f"sets {mode} precision. Remove the autocast around the forward. For its numerics write "
                f'"torch_autocast": {{"enabled": true, "dtype": "{short_name(dtype)}"}} in the config; to allow it, '
                'write "zeroamp": {"external_autocast": "allow"}.'
            )

    return look


def _warn_if_different(device_type: str, dtype: torch.dtype) -> bool:
    """Log a warning if the caller's autocast is not the config's; return whether one was logged."""
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
        "the config's autocast. Remove the one around the forward.",
        *(words, short_name(dtype)),
    )
    return True


def _is_inside_disabled(device_type: str) -> bool:
    """Whether an autocast context is entered that enables nothing: state alone does not tell it from none at all."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    others = [name for name in _OTHER_DEVICE_TYPES if name != device_type and torch.amp.is_autocast_available(name)]
    return depth > 0 and not any(torch.is_autocast_enabled(name) for name in others)

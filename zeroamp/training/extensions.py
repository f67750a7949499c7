"""Imports packages outside of the core only if a config key needs them. See `zeroamp.EXTENSIONS`."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zeroamp.policies.policy import Policy

if TYPE_CHECKING:
    from zeroamp.training.step import TrainStep


def load(key: str) -> Callable[..., Any]:
    """Import and return the function that `zeroamp.EXTENSIONS` lists under `key`."""
    from zeroamp import EXTENSIONS  # not at the top, where `zeroamp` is only partly imported

    module, _, name = EXTENSIONS[key].partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def attach_extensions(train: "TrainStep", policy: Policy) -> None:
    """Call the functions of `EXTENSIONS` whose keys the config enables, in that order, each once, with `train`."""
    from zeroamp import EXTENSIONS

    keys = {target: key for key, target in EXTENSIONS.items() if getattr(policy, key.rpartition(".")[2], None)}
    for key in keys.values():
        load(key)(train)

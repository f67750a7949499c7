"""Loads what is outside of the core by its name, where a config asks for it. The core imports none of it."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zeroamp.policies.policy import Policy

if TYPE_CHECKING:
    from zeroamp.training.step import TrainStep


def load(key: str) -> Callable[..., Any]:
    """Return the function that `zeroamp.EXTENSIONS` has under `key`."""
    from zeroamp import EXTENSIONS  # not at the top: `zeroamp` is being imported then

    module, _, name = EXTENSIONS[key].partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def attach_extensions(train: "TrainStep", policy: Policy) -> None:
    """Call, once each, the functions of the keys that are on in the config, in the order of the table."""
    from zeroamp import EXTENSIONS

    keys = {target: key for key, target in EXTENSIONS.items() if getattr(policy, key.rpartition(".")[2], None)}
    for key in keys.values():
        load(key)(train)

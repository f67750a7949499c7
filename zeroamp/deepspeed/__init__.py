"""DeepSpeed's API on zeroamp. DeepSpeed itself is not needed.

`import zeroamp.deepspeed as deepspeed` lets a script that calls `deepspeed.initialize` run on zeroamp. Names are
imported at their first use: importing the package loads only the finder of submodules. docs/deepspeed-api.md has a
table of what each call does, and of what is refused.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from zeroamp.deepspeed.submodules import register
from zeroamp.version import __version__ as __version__

if TYPE_CHECKING:
    from zeroamp.deepspeed.accelerator import get_accelerator as get_accelerator
    from zeroamp.deepspeed.arguments import DeepSpeedConfigError as DeepSpeedConfigError
    from zeroamp.deepspeed.arguments import add_config_arguments as add_config_arguments
    from zeroamp.deepspeed.comm import init_distributed as init_distributed
    from zeroamp.deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine
    from zeroamp.deepspeed.initialization import initialize as initialize
    from zeroamp.deepspeed.optimizer import ZeroOptimizer as ZeroOptimizer
    from zeroamp.deepspeed.refused import UnsupportedError as UnsupportedError
    from zeroamp.deepspeed.utils import OnDevice as OnDevice
    from zeroamp.deepspeed.utils import log_dist as log_dist
    from zeroamp.deepspeed.utils import logger as logger

_HOMES = {
    "DeepSpeedConfigError": "zeroamp.deepspeed.arguments",
    "DeepSpeedEngine": "zeroamp.deepspeed.engine",
    "OnDevice": "zeroamp.deepspeed.utils",
    "UnsupportedError": "zeroamp.deepspeed.refused",
    "ZeroOptimizer": "zeroamp.deepspeed.optimizer",
    "add_config_arguments": "zeroamp.deepspeed.arguments",
    "get_accelerator": "zeroamp.deepspeed.accelerator",
    "init_distributed": "zeroamp.deepspeed.comm",
    "initialize": "zeroamp.deepspeed.initialization",
    "log_dist": "zeroamp.deepspeed.utils",
    "logger": "zeroamp.deepspeed.utils",
}
"""Public name -> the module that defines it."""

MODULES = ("accelerator", "checkpointing", "comm", "moe", "ops", "runtime", "utils", "zero")
"""Submodules with the names of DeepSpeed's, imported at their first use: `deepspeed.zero.Init`."""

__all__ = sorted(_HOMES)

register()

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in MODULES:
            return import_module(f"{__name__}.{name}")
        if name in _HOMES:
            value = getattr(import_module(_HOMES[name]), name)
            globals()[name] = value  # later uses find it here, without `__getattr__`
            return value
        from zeroamp.deepspeed.refused import missing

        return missing(__name__, name, (*__all__, *MODULES))

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *MODULES})

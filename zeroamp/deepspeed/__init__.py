"""DeepSpeed's API on zeroamp. DeepSpeed itself is not needed.

`import zeroamp.deepspeed as deepspeed` lets a script that calls `deepspeed.initialize` run on zeroamp. Names are
imported at their first use: importing the package loads only the finder of submodules. docs/deepspeed-api.md has a
table of what each call does, and of what is refused.
"""

from importlib import import_module
from typing import Any

from zeroamp import _public_names
from zeroamp.deepspeed.submodules import register
from zeroamp.version import __version__ as __version__

MODULES = ("accelerator", "comm", "ops", "runtime", "utils", "zero")
"""Submodules with the names of DeepSpeed's, imported at their first use: `deepspeed.zero.Init`."""

_HOMES = {name: home for name, home in _public_names(__file__).items() if name not in MODULES}
"""Public name -> the module that defines it."""

__all__ = sorted(_HOMES)

register()


def __getattr__(name: str) -> Any:
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

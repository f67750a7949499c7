"""Imports the submodules of DeepSpeed that have no file here: other names of a module, and refused ones."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PREFIX = "zeroamp.deepspeed."

ALIASES = {
    "accelerator.real_accelerator": "accelerator",
    "comm.comm": "comm",
    "ops.adam.cpu_adam": "ops.adam",
    "ops.adam.fused_adam": "ops.adam",
    "runtime.engine": "engine",
    "runtime.utils": "utils",
    "runtime.zero": "zero",
    "runtime.zero.partition_parameters": "zero",
    "utils.logging": "utils",
}
"""Submodule of DeepSpeed -> the module here that has its names."""


class Submodules(MetaPathFinder, Loader):
    """Finds what Python has not found below `zeroamp.deepspeed`, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an alias or a refused module; None for all others."""
        del path, target
        inside = fullname.removeprefix(PREFIX)
        if inside == fullname:
            return None
        from zeroamp.deepspeed.refused import reason_of

        is_here = inside in ALIASES or reason_of(inside) is not None
        return ModuleSpec(fullname, self, is_package=True) if is_here else None

    def exec_module(self, module: ModuleType) -> None:
        """Give the module a `__getattr__`: its submodules, the names of its alias, and refused ones."""
        from zeroamp.deepspeed.refused import missing

        inside = module.__name__.removeprefix(PREFIX)
        home = import_module(PREFIX + ALIASES[inside]) if inside in ALIASES else None

        def find(name: str) -> Any:
            if f"{inside}.{name}" in ALIASES:
                return import_module(f"{module.__name__}.{name}")
            if home is not None and not name.startswith("__") and hasattr(home, name):
                return getattr(home, name)
            return missing(module.__name__, name, dir(home) if home is not None else ())

        vars(module)["__getattr__"] = find


def register() -> None:
    """Append the finder, once: Python asks it last."""
    if not any(isinstance(each, Submodules) for each in sys.meta_path):
        sys.meta_path.append(Submodules())

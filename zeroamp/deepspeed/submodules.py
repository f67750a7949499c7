"""Imports the submodules of DeepSpeed that zeroamp refuses: the import succeeds, and each use raises the reason."""

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PREFIX = "zeroamp.deepspeed."

ALIASES = {
    "accelerator.real_accelerator": "accelerator",
    "comm.comm": "comm",
    "ops.adam.cpu_adam": "ops.adam",
    "ops.adam.fused_adam": "ops.adam",
    "runtime.activation_checkpointing.checkpointing": "checkpointing",
    "runtime.dataloader": "data_loaders",
    "utils.init_on_device": "utils",
    "utils.logging": "utils",
    "utils.nvtx": "utils",
    "utils.tensor_fragment": "utils",
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
        """Give the module a `__getattr__`: the names of its alias, or refused ones."""
        inside = module.__name__.removeprefix(PREFIX)
        if inside in ALIASES:
            vars(module)["__getattr__"] = partial(getattr, import_module(PREFIX + ALIASES[inside]))
        else:
            from zeroamp.deepspeed.refused import missing

            vars(module)["__getattr__"] = lambda name: missing(module.__name__, name, ())


def register() -> None:
    """Append the finder, once: Python asks it last."""
    if not any(isinstance(each, Submodules) for each in sys.meta_path):
        sys.meta_path.append(Submodules())

"""zeroamp: torch.autocast numerics and ZeRO stages on native PyTorch FSDP2, from a DeepSpeed-style config.

Public names are listed in `__init__.pyi`, and imported at their first use. `import zeroamp` itself imports nothing
else, not even torch, so that reading the version does not wait for FSDP2.
"""

import ast
from importlib import import_module
from pathlib import Path

from zeroamp.version import __version__ as __version__


def _public_names() -> dict[str, str]:
    """Return public name -> the module that defines it, from the imports in the stub."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {each.name: str(node.module) for node in imports for each in node.names}
    del homes["__version__"]  # imported above
    return homes


_HOMES = _public_names()

EXTENSIONS = {
    "tensorboard": "zeroamp.reporting.monitors:attach_monitors",
    "csv_monitor": "zeroamp.reporting.monitors:attach_monitors",
    "wandb": "zeroamp.reporting.monitors:attach_monitors",
    "wall_clock_breakdown": "zeroamp.reporting.monitors:attach_monitors",
    "torch.optim.Muon": "zeroamp.optimizers.muon:updating_matrices",
    "TrainStep.saving": "zeroamp.checkpoint.background:saving_of",
}
"""Config key, class of an optimizer, or attribute of the core -> a function outside of the core, as "module:function".

A `TrainStep` imports and calls the function of each key that is on in its config. The core (policies, hooks, planning,
wrapping, training, ledger) depends on other packages only through this table."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=import_module(__name__))
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # later uses find it here, without `__getattr__`
    return value


def __dir__() -> list[str]:
    return ["__version__", *__all__]

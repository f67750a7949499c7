"""zeroamp: torch.autocast numerics and ZeRO stages on native PyTorch FSDP2, from a DeepSpeed-style config.

Public names are listed in `__init__.pyi`, and imported at their first use. `import zeroamp` itself imports nothing
else, not even torch, so that reading the version does not wait for FSDP2.
"""

import ast
from importlib import import_module
from pathlib import Path

from zeroamp.version import __version__ as __version__


def _public_names(file: str) -> dict[str, str]:
    """Return public name -> the module that defines it, from the `import … as …` of a package's stub."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {each.name: str(node.module) for node in imports for each in node.names if each.asname}
    del homes["__version__"]  # imported above
    return homes


_HOMES = _public_names(__file__)

EXTENSIONS = {
    "zeroamp.overrides": "zeroamp.module_dtypes.extension:ModuleDtypes",
    "data_types.keep_in_fp32_modules": "zeroamp.module_dtypes.extension:ModuleDtypes",
    "model._keep_in_fp32_modules": "zeroamp.module_dtypes.extension:ModuleDtypes",
    "model._keep_in_fp32_modules_strict": "zeroamp.module_dtypes.extension:ModuleDtypes",
    "zeroamp.reproducible": "zeroamp.reproducible.extension:Reproducible",
    "zeroamp.param_gather_dtype": "zeroamp.float8.extension:Float8",
    "data_types.optimizer_states_dtype": "zeroamp.optimizers.bf16_states:OptimizerStates",
    "zeroamp.offload_between_steps": "zeroamp.host_memory.between_steps:OffloadBetweenSteps",
    "torch.distributed.tensor.DTensor": "zeroamp.meshes.partial_gradients:PartialGradients",
    "torch_autocast.lower_precision_safe_modules=auto": "zeroamp.discovery.extension:Discovery",
}
"""What a run has -> the `Extension` (`zeroamp/policies/extensions.py`) that is loaded for it, as "module:name".

What a run has is written as a config key, as "key=value", as the class of a parameter, or as "model." and an attribute
of a module. Extensions are called in this order: float8 chooses among the weights that no override names. What else the
core uses from other packages it imports inside of the function that needs it: `pyproject.toml` has the list."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=import_module(__name__))
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # later uses find it here, without `__getattr__`
    return value


def __dir__() -> list[str]:
    return ["__version__", *__all__]

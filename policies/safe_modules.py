"""Decides by the classes of modules which parameters are safe to all-gather in low precision.

A parameter is safe if every module that owns it directly is an instance of a listed class.
"""

import importlib
from collections.abc import Sequence

from torch import nn

from zeroamp.policies.errors import ConfigError, nearest, repr_on_all_ranks

KEY = "torch_autocast.lower_precision_safe_modules"

DEFAULT_SAFE_MODULES = ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")
"""DeepSpeed's default list. Under `torch.autocast`, weights and biases of all four are cast to the low dtype."""


def resolve_safe_classes(names: Sequence[str], model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the classes with these names.

    A name is "package.module.Class", or a bare "Class" that is looked up in `torch.nn` and then among the classes of
    `model`. The result is for `isinstance`, so subclasses count too.

    Raises:
        ConfigError: a name cannot be imported, is not the name of a module class, or is the name of several classes.
    """
    return tuple(_resolve(name, model) for name in names)


def _resolve(name: str, model: nn.Module) -> type[nn.Module]:
    found = _import_class(name) if "." in name else _find_bare_class(name, model)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        what = repr_on_all_ranks(found)
        raise ConfigError(f"{KEY} names {name!r}, but {what} is not a torch.nn.Module class. Name a module class.")
    return found


def _import_class(name: str) -> object:
    module_name, _, class_name = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{KEY} names {name!r}, but {module_name!r} has no importable {class_name!r} ({error}). Check the "
            "spelling and that the package is installed."
        ) from error


def _find_bare_class(name: str, model: nn.Module) -> object:
    if hasattr(nn, name):
        return getattr(nn, name)
    candidates = {type(module) for module in model.modules() if type(module).__name__ == name}
    if len(candidates) == 1:
        return candidates.pop()
    if candidates:
        carriers, hint = f"{len(candidates)} classes of the model have", ""
    else:
        carriers = "no class of torch.nn or of the model has"
        classes = [*(type(module).__name__ for module in model.modules()), *vars(nn)]
        hint = nearest(name, (each for each in classes if each[0].isupper()))
    remedy = " ".join(filter(None, (hint, 'Write the full name "package.module.Class".')))
    raise ConfigError(f"{KEY} names {name!r}, a name that {carriers}. {remedy}")


def unsafe_owner(
    owners: Sequence[tuple[nn.Module, str]], safe_classes: tuple[type[nn.Module], ...]
) -> nn.Module | None:
    """Return the first owner that makes a parameter unsafe, or None if the parameter is safe.

    `owners` are pairs of a module and its name for the parameter. In torch.nn's own classes, only `weight` and `bias`
    are inputs of an op that autocast casts. Others, such as `weight_g` and `weight_v` of weight normalisation, are read
    in fp32.
    """
    return next((owner for owner, name in owners if not _is_safe_use(owner, name, safe_classes)), None)


def _is_safe_use(owner: nn.Module, name: str, safe_classes: tuple[type[nn.Module], ...]) -> bool:
    matched = [cls for cls in safe_classes if isinstance(owner, cls)]
    return any(name in ("weight", "bias") or not cls.__module__.startswith("torch.nn.") for cls in matched)

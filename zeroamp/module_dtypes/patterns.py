"""Finds the modules and tensors that a pattern of the config names: in `keep_in_fp32_modules` and `zeroamp.overrides`.

A pattern is a name or a class, with `*` and `?` too. A name is the FQN of a module, parameter or buffer, or the last
parts of one: "norm" matches every "….norm". A class is written bare ("Linear") or in full ("torch.nn.Linear"), and
subclasses count. A pattern that is a name and a class matches both. A module that is registered twice is matched under
all of its names. Nothing is imported: "model.norm" may be an FQN, and a file model.py must not be run for it.
"@lm_head" and "@router" name modules by their role (`roles.py`).
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain

import torch
from torch import nn

from zeroamp.module_dtypes.roles import modules_of_role


@dataclass(frozen=True, slots=True)
class Matches:
    """What a pattern names in a model."""

    modules: frozenset[str]
    """FQNs of modules. "" is the root."""
    tensors: Mapping[str, torch.Tensor]
    """FQN -> parameter or buffer, of those that the pattern names directly."""

    def __bool__(self) -> bool:
        """Return whether the pattern names anything."""
        return bool(self.modules or self.tensors)


def find_matches(model: nn.Module, pattern: str) -> Matches:
    """Return the modules, parameters and buffers of `model` that `pattern` names.

    Raises:
        ConfigError: the pattern is a role, and the model has no such module.
    """
    paths = list(model.named_modules(remove_duplicate=False))
    if pattern.startswith("@"):
        of_role = modules_of_role(model, pattern)
        return Matches(frozenset(fqn for fqn, module in paths if module in of_role), {})
    classes = tuple(cls for cls in classes_of(model) if _is_class(cls, pattern))
    modules = {module for fqn, module in paths if isinstance(module, classes) or (fqn and _is_name(fqn, pattern))}
    named = [(f"{fqn}.{name}".lstrip("."), owner, name, each) for fqn, owner in paths for name, each in _own(owner)]
    own = {(owner, name) for fqn, owner, name, _ in named if _is_name(fqn, pattern)}
    tensors = {fqn: tensor for fqn, owner, name, tensor in named if (owner, name) in own}
    return Matches(frozenset(fqn for fqn, module in paths if module in modules), tensors)


def classes_of(model: nn.Module) -> list[type[nn.Module]]:
    """Return the classes of all modules and their bases, except `nn.Module`, each once."""
    bases = dict.fromkeys(chain.from_iterable(type(module).__mro__ for module in model.modules()))
    return [base for base in bases if issubclass(base, nn.Module) and base is not nn.Module]


def known_names(model: nn.Module) -> list[str]:
    """Return the FQNs of modules and parameters, the last parts of these, and the names of classes."""
    fqns = [fqn for fqn, _ in chain(model.named_modules(), model.named_parameters())]
    names = chain(fqns, (fqn.rpartition(".")[2] for fqn in fqns), (cls.__name__ for cls in classes_of(model)))
    return list(dict.fromkeys(names))


def _is_class(cls: type[nn.Module], pattern: str) -> bool:
    module_name, _, last = pattern.rpartition(".")
    if getattr(sys.modules.get(module_name), last, None) is cls:  # a public name, such as torch.nn.Linear
        return True
    return any(fnmatchcase(name, pattern) for name in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}"))


def _is_name(fqn: str, pattern: str) -> bool:
    parts = fqn.split(".")
    return any(fnmatchcase(".".join(parts[start:]), pattern) for start in range(len(parts)))


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in chain(module._parameters.items(), module._buffers.items()):
        if tensor is not None:
            yield name, tensor

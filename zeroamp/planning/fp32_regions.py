"""Which modules and parameters stay in fp32 whatever the mode: `data_types.keep_in_fp32_modules`.

Pure: reads names, classes, and `_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict` of transformers models.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn

from zeroamp.policies.errors import ConfigError
from zeroamp.policies.policy import Policy

KEY = "data_types.keep_in_fp32_modules"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp32Regions:
    """What stays in fp32, and which pattern matched it."""

    modules: Mapping[str, str] = field(default_factory=dict)
    """FQN -> pattern. Outermost modules: all that is inside computes in fp32 too."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """FQN -> pattern, of parameters and buffers that are named themselves. Their modules compute as they would."""

    def pattern_of(self, fqn: str) -> str | None:
        """Return the pattern that keeps the parameter, buffer or module `fqn` in fp32, or None."""
        if fqn in self.tensors:
            return self.tensors[fqn]
        return next((self.modules[outer] for outer in (*modules_around(fqn), fqn) if outer in self.modules), None)


def find_fp32_regions(model: nn.Module, policy: Policy) -> Fp32Regions:
    """Resolve the patterns of the policy in `model`.

    A pattern is an FQN, one or several parts of an FQN ("norm" is every `….norm` and `….norm.…`), a class name (bare or
    "package.module.Class", subclasses count), or any of these with `*` and `?`. "auto" takes them from transformers
    models: `_keep_in_fp32_modules_strict`, and in mode "fp16" `_keep_in_fp32_modules` too, as `from_pretrained` does.

    Raises:
        ConfigError: a pattern of the config matches nothing.
    """
    if policy.mode == "fp32":
        return Fp32Regions()
    asked = policy.keep_in_fp32_modules
    patterns = list(_patterns_of_model(model, policy)) if asked == "auto" else list(asked)
    modules: dict[str, str] = {}
    tensors: dict[str, str] = {}
    for pattern in patterns:
        found = [fqn for fqn, module in model.named_modules() if fqn and _matches(fqn, module, pattern)]
        modules |= {fqn: pattern for fqn in found if fqn not in modules}
        named = [fqn for fqn, _ in _named_tensors(model) if _matches_name(fqn, pattern)]
        tensors |= {fqn: pattern for fqn in named if fqn not in tensors}
        if asked != "auto" and not (found or named):
            raise ConfigError(
                f"{KEY}: {pattern!r} matches nothing of {type(model).__name__}. Use names, parts of names or class "
                "names of its modules, parameters and buffers; print model.named_modules() to see them."
            )
    outermost = {fqn: pattern for fqn, pattern in modules.items() if not _is_inside(fqn, modules)}
    return Fp32Regions(
        modules=outermost,
        tensors={fqn: pattern for fqn, pattern in tensors.items() if not _is_inside(fqn, outermost)},
    )


def _patterns_of_model(model: nn.Module, policy: Policy) -> Iterator[str]:
    for module in model.modules():
        yield from getattr(module, "_keep_in_fp32_modules_strict", None) or ()
        if policy.mode == "fp16":
            yield from getattr(module, "_keep_in_fp32_modules", None) or ()


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _matches(fqn: str, module: nn.Module, pattern: str) -> bool:
    classes = [(cls.__name__, f"{cls.__module__}.{cls.__qualname__}") for cls in type(module).__mro__]
    is_class = any(fnmatchcase(name, pattern) for names in classes for name in names if not _is_base(names[1]))
    return is_class or _matches_name(fqn, pattern)


def _is_base(full_name: str) -> bool:
    return full_name in ("torch.nn.modules.module.Module", "builtins.object")


def _matches_name(fqn: str, pattern: str) -> bool:
    """Whether the last parts of `fqn`, one or more, are the pattern: "norm" is the end of "layers.0.norm"."""
    parts = fqn.split(".")
    return any(fnmatchcase(".".join(parts[start:]), pattern) for start in range(len(parts)))


def _is_inside(fqn: str, modules: Container[str]) -> bool:
    return any(outer in modules for outer in modules_around(fqn))


def modules_around(fqn: str) -> Iterator[str]:
    """Yield the FQNs of the modules around a module or tensor, outermost first, without the root."""
    parts = fqn.split(".")
    yield from (".".join(parts[:depth]) for depth in range(1, len(parts)))

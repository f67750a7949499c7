"""Finds the modules and parameters that `keep_in_fp32_modules` and `zeroamp.overrides` keep in fp32 in every mode.

Reads only names, classes, and `_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict` of transformers models.
"""

from collections.abc import Container
from itertools import chain

import torch
from torch import nn

from zeroamp.module_dtypes.overrides import Overrides
from zeroamp.module_dtypes.patterns import find_matches
from zeroamp.planning.fp32_regions import Fp32Regions
from zeroamp.planning.parameter_uses import modules_around
from zeroamp.policies.auto_wrap import has_forward
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.policy import Policy

KEY = "data_types.keep_in_fp32_modules"


def find_fp32_regions(model: nn.Module, policy: Policy, overrides: Overrides) -> Fp32Regions:
    """Return the modules and tensors of `model` that `keep_in_fp32_modules` or `overrides` keep in fp32.

    See `zeroamp.module_dtypes.patterns` for patterns. "auto" takes the patterns from transformers models:
    `_keep_in_fp32_modules_strict`, and in mode "fp16" also `_keep_in_fp32_modules`, as `from_pretrained` does.

    Raises:
        ConfigError: a pattern of the config matches nothing.
    """
    modules, tensors = ({}, {}) if policy.mode == "fp32" else _kept(model, policy)
    for fqn in overrides.modules:
        first = overrides.of(fqn)
        if first is not None and first.asked.compute == torch.float32:
            modules.setdefault(fqn, str(first))
    modules = _with_forward(model, modules, tensors)
    for fqn, _ in model.named_parameters(remove_duplicate=False):
        first = overrides.of(fqn)
        if first is not None and first.asked.compute is None and first.asked.param == torch.float32:
            tensors.setdefault(fqn, str(first))
    outermost = {fqn: pattern for fqn, pattern in modules.items() if not _is_inside(fqn, modules)}
    return Fp32Regions(
        modules=outermost,
        tensors={fqn: pattern for fqn, pattern in tensors.items() if not _is_inside(fqn, outermost)},
    )


def _with_forward(model: nn.Module, modules: dict[str, str], tensors: dict[str, str]) -> dict[str, str]:
    """Return `modules`, with containers that are never called (a ModuleList) replaced by the modules inside them.

    Tensors that such a container owns (a ParameterList's) are added to `tensors`.
    """
    called: dict[str, str] = {}
    pending = [(fqn, pattern, model.get_submodule(fqn)) for fqn, pattern in reversed(modules.items())]
    while pending:
        fqn, pattern, module = pending.pop()
        if has_forward(module):
            called.setdefault(fqn, pattern)
            continue
        own = (*module._parameters, *module._buffers)
        tensors |= {f"{fqn}.{name}": pattern for name in own if f"{fqn}.{name}" not in tensors}
        pending += reversed([(f"{fqn}.{name}", pattern, child) for name, child in module.named_children()])
    return called


def _kept(model: nn.Module, policy: Policy) -> tuple[dict[str, str], dict[str, str]]:
    """Return the modules and the tensors that `keep_in_fp32_modules` matches, each with its key and pattern."""
    asked = policy.keep_in_fp32_modules
    patterns = _patterns_of_model(model, policy) if asked == "auto" else asked
    modules: dict[str, str] = {}
    tensors: dict[str, str] = {}
    for pattern in patterns:
        matches = find_matches(model, pattern)
        found, named = sorted(matches.modules - {""}), matches.tensors
        modules |= {fqn: f"{KEY} {pattern!r}" for fqn in found if fqn not in modules}
        tensors |= {fqn: f"{KEY} {pattern!r}" for fqn in named if fqn not in tensors}
        if asked != "auto" and not (found or named):
            raise ConfigError(
                f"{KEY}: {pattern!r} matches nothing of {type(model).__name__}. Use names, parts of names or class "
                "names of its modules, parameters and buffers; print model.named_modules() to see them."
            )
    return modules, tensors


def _patterns_of_model(model: nn.Module, policy: Policy) -> list[str]:
    names = ("_keep_in_fp32_modules_strict", *(("_keep_in_fp32_modules",) if policy.mode == "fp16" else ()))
    found = (getattr(module, name, None) or () for module in model.modules() for name in names)
    return sorted(set(chain.from_iterable(found)))  # transformers has sets, whose order differs between ranks


def _is_inside(fqn: str, modules: Container[str]) -> bool:
    return any(outer in modules for outer in modules_around(fqn))

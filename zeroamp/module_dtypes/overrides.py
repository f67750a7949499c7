"""Finds the parameters and modules to which the items of `zeroamp.overrides` apply. Reads names and classes only."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from zeroamp.module_dtypes.patterns import Matches, find_matches, known_names
from zeroamp.planning.parameter_uses import modules_around
from zeroamp.policies.auto_wrap import has_forward
from zeroamp.policies.errors import ConfigError, nearest
from zeroamp.policies.policy import Policy
from zeroamp.policies.schema.precision import OverrideBlock


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """One pattern of an item of `zeroamp.overrides`, and the item."""

    index: int
    """The item's place in the list, from 0."""
    pattern: str
    """An entry of the item's `modules`."""
    asked: OverrideBlock
    """The item."""

    def __str__(self) -> str:
        """Return the path of the key, and the pattern."""
        return f"zeroamp.overrides.{self.index} (modules {self.pattern!r})"

    @property
    def low_dtype(self) -> torch.dtype | None:
        """The low dtype in which parameters are all-gathered; None if the override sets none."""
        asked = self.asked.compute or self.asked.param
        return None if asked == torch.float32 else asked


@dataclass(frozen=True, kw_only=True, slots=True)
class Overrides:
    """The overrides of a policy, by the modules and parameters of one model."""

    modules: Mapping[str, Override] = field(default_factory=dict)
    """FQN -> the first override that matches the module itself. "" is the root."""
    parameters: Mapping[str, Override] = field(default_factory=dict)
    """FQN -> the first override that matches the parameter itself."""

    def of(self, fqn: str) -> Override | None:
        """Return the first override that matches the module or parameter `fqn`, or a module around it."""
        if not (self.modules or self.parameters):
            return None
        found = [self.parameters.get(fqn), *(self.modules.get(around) for around in ("", *modules_around(fqn), fqn))]
        return min((each for each in found if each is not None), key=lambda each: each.index, default=None)


def find_overrides(model: nn.Module, policy: Policy) -> Overrides:
    """Return the overrides of the policy by modules and parameters of `model`. See `zeroamp.module_dtypes.patterns`.

    Raises:
        ConfigError: a pattern matches nothing, or nothing that earlier items do not match; or an item sets `compute` of
            a parameter, or `compute` fp32 of the root.
    """
    modules: dict[str, Override] = {}
    parameters: dict[str, Override] = {}
    matches: dict[Override, Matches] = {}
    for index, asked in enumerate(policy.overrides):
        for pattern in asked.modules:
            override = Override(index=index, pattern=pattern, asked=asked)
            match = matches[override] = _match(override, model)
            modules |= {fqn: override for fqn in sorted(match.modules) if fqn not in modules}
            parameters |= {fqn: override for fqn in sorted(match.tensors) if fqn not in parameters}
    overrides = Overrides(modules=modules, parameters=parameters)
    for override, match in matches.items():
        _refuse_impossible(override, match, model)
        firsts = [overrides.of(fqn) for fqn in sorted((*match.modules, *match.tensors))]
        if all(first is not None and first.index < override.index for first in firsts):
            raise ConfigError(
                f"{override} applies to nothing, because {firsts[0]} is earlier in the list and matches the same. Move "
                "the narrower pattern to the front of the list, or remove one."
            )
    return overrides


def _match(override: Override, model: nn.Module) -> Matches:
    found = find_matches(model, override.pattern)
    parameters = {fqn: tensor for fqn, tensor in found.tensors.items() if isinstance(tensor, nn.Parameter)}
    if not (found.modules or parameters):
        hint = nearest(override.pattern, known_names(model))
        raise ConfigError(
            f"{override} matches no module, parameter or class of {type(model).__name__}. {hint and f'{hint} '}"
            "Print model.named_modules() to see names and classes."
        )
    return replace(found, tensors=parameters)


def _refuse_impossible(override: Override, match: Matches, model: nn.Module) -> None:
    """Raise for `compute` of a parameter or of a module without a forward, and for `compute` fp32 of the root."""
    asks_compute = override.asked.compute is not None
    alone = [fqn for fqn in sorted(match.tensors) if not set(modules_around(fqn)) & match.modules]
    if asks_compute and alone:
        raise ConfigError(
            f"{override} sets compute, but {alone[0]} is a parameter. Name a module, or set param, which applies to "
            "parameters."
        )
    for fqn in sorted(match.modules) if asks_compute else ():
        module = model.get_submodule(fqn)
        if module._parameters and not has_forward(module):
            raise ConfigError(
                f"{override} sets compute, but {fqn} is a {type(module).__name__}, which has parameters and no "
                "forward. Name the module that computes with them, or set param."
            )
    if override.asked.compute == torch.float32 and "" in match.modules:
        raise ConfigError(
            f"{override} sets compute fp32 for the root, {type(model).__name__}. Name modules inside it, or leave "
            "torch_autocast, bf16 and fp16 out of the config."
        )

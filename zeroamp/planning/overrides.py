"""Finds the parameters and modules to which the items of `zeroamp.overrides` apply. Reads names and classes only.

[Note: Names and classes]
A pattern with `*`, `?` or `[` matches FQNs, or their last parts. Any other pattern is a name or a class. It is a name
if it is the FQN of a module or parameter, or the last parts of one ("norm" matches every "….norm"). It is a class if
the model has a module of that class or of a subclass. The class is written bare ("Linear") or in full
("torch.nn.Linear"). A pattern that is a name and a class, of different modules, raises a ConfigError.
"""

import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import nn

from zeroamp.planning.parameter_uses import all_names, has_forward, matches_name, modules_around
from zeroamp.policies.dtypes import stored_dtype
from zeroamp.policies.errors import ConfigError, some_of
from zeroamp.policies.policy import Policy
from zeroamp.policies.schema import OverrideBlock
from zeroamp.policies.schema.keys import nearest


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


@dataclass(frozen=True, slots=True)
class _Match:
    """The FQNs that a pattern matches."""

    modules: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.modules or self.parameters)


def find_overrides(model: nn.Module, policy: Policy, ignored_params: Iterable[nn.Parameter] = ()) -> Overrides:
    """Return the overrides of the policy by modules and parameters of `model`. See [Note: Names and classes].

    Overrides do not apply to `ignored_params`.

    Raises:
        ConfigError: a pattern matches nothing, is ambiguous, or has no effect because earlier items match the same; or
            an item sets `compute` of a parameter, or `compute` fp32 of the root.
    """
    modules: dict[str, Override] = {}
    parameters: dict[str, Override] = {}
    matches: dict[Override, _Match] = {}
    for index, asked in enumerate(policy.overrides):
        for pattern in asked.modules:
            override = Override(index=index, pattern=pattern, asked=asked)
            match = matches[override] = _match(override, model)
            modules |= {fqn: override for fqn in sorted(match.modules) if fqn not in modules}
            parameters |= {fqn: override for fqn in sorted(match.parameters) if fqn not in parameters}
    overrides = Overrides(modules=modules, parameters=parameters)
    ignored = {id(parameter) for parameter in ignored_params}
    for override, match in matches.items():
        _refuse_impossible(override, match, model)
        _refuse_unused(override, match, overrides, model, ignored)
    return overrides


def _match(override: Override, model: nn.Module) -> _Match:
    pattern = override.pattern
    modules = [fqn for fqn, _ in model.named_modules(remove_duplicate=False) if fqn and matches_name(fqn, pattern)]
    parameters = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False) if matches_name(fqn, pattern)]
    by_name = _Match(frozenset(all_names(model, modules)), frozenset(_all_names_of_parameters(model, parameters)))
    is_glob = any(sign in pattern for sign in "*?[")
    by_class = _Match() if is_glob else _match_class(override, model)
    if by_name and by_class and by_name != by_class:
        names = some_of(sorted(by_name.modules | by_name.parameters), 3)
        raise ConfigError(
            f"{override} is the name of {names} and a class of {_listed(by_class.modules)}, which are not the same. "
            'Write the full class "package.module.Class", or for the name a pattern with more of the FQN.'
        )
    if not (by_name or by_class):
        hint = nearest(pattern, _known_names(model))
        raise ConfigError(
            f"{override} matches no module, parameter or class of {type(model).__name__}. {hint and f'{hint} '}"
            "Print model.named_modules() to see names and classes."
        )
    return by_name or by_class


def _all_names_of_parameters(model: nn.Module, fqns: Iterable[str]) -> Iterator[str]:
    """Yield all FQNs of these parameters by the same owner and name: an owner that is registered twice has several."""
    own = {(model.get_submodule(owner), name) for owner, _, name in (fqn.rpartition(".") for fqn in fqns)}
    for fqn, module in model.named_modules(remove_duplicate=False) if own else ():
        for name in (name for name in module._parameters if (module, name) in own):
            yield f"{fqn}.{name}" if fqn else name


def _match_class(override: Override, model: nn.Module) -> _Match:
    name = override.pattern
    module_name, _, last = name.rpartition(".")
    # Looks in imported modules only: "model.norm" may be an FQN, and a file model.py must not be run for it.
    public = getattr(sys.modules.get(module_name), last, None) if module_name else None
    found = {cls for cls in _classes(model) if cls is public or name in (cls.__name__, _full_name(cls))}
    found = {cls for cls in found if not any(cls is not other and issubclass(cls, other) for other in found)}
    if len(found) > 1:
        raise ConfigError(
            f"{override} is the name of the classes {some_of(sorted(map(_full_name, found)))}. Write one in full."
        )
    fqns = (
        fqn for fqn, module in model.named_modules(remove_duplicate=False) if found and isinstance(module, tuple(found))
    )
    return _Match(frozenset(fqns))


def _classes(model: nn.Module) -> set[type[nn.Module]]:
    """Return the classes of all modules and their bases, except `nn.Module`."""
    bases = set(chain.from_iterable(type(module).__mro__ for module in model.modules()))
    return {base for base in bases if issubclass(base, nn.Module) and base is not nn.Module}


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _known_names(model: nn.Module) -> list[str]:
    fqns = [fqn for fqn, _ in chain(model.named_modules(), model.named_parameters())]
    names = chain(fqns, (fqn.rpartition(".")[2] for fqn in fqns), (cls.__name__ for cls in _classes(model)))
    return list(dict.fromkeys(names))


def _refuse_impossible(override: Override, match: _Match, model: nn.Module) -> None:
    """Raise for `compute` of a parameter or of a module without a forward, and for `compute` fp32 of the root."""
    asks_compute = override.asked.compute is not None
    alone = [fqn for fqn in sorted(match.parameters) if not set(modules_around(fqn)) & match.modules]
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


def _refuse_unused(
    override: Override, match: _Match, overrides: Overrides, model: nn.Module, ignored: Container[int]
) -> None:
    """Raise for an override without effect: earlier items match the same, or it matches no parameter with a dtype."""
    firsts = [overrides.of(fqn) for fqn in sorted(match.modules | match.parameters)]
    if all(first is not None and first.index < override.index for first in firsts):
        raise ConfigError(
            f"{override} applies to nothing, because {firsts[0]} is earlier in the list and matches the same. Move the "
            "narrower pattern to the front of the list, or remove one."
        )
    if override.asked.compute != torch.float32 and not any(_applied_to(override, match, overrides, model, ignored)):
        names = [fqn for fqn, _ in _matched_parameters(match, model)]
        if not names:
            raise ConfigError(
                f"{override} sets {override.asked.settings()}, but {_listed(match.modules)} "
                f"{'owns' if len(match.modules) == 1 else 'own'} no parameter. Remove it."
            )
        raise ConfigError(
            f"{override} applies to no parameter. {some_of(names, 3)} {'is' if len(names) == 1 else 'are'} 0-D, "
            "quantized, not stored in fp32, in ignored_params, or matched by an earlier override. Remove it."
        )


def _matched_parameters(match: _Match, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that a pattern names, and those inside the modules that it names, under every name."""
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        if fqn in match.parameters or not match.modules.isdisjoint(("", *modules_around(fqn))):
            yield fqn, parameter


def _applied_to(
    override: Override, match: _Match, overrides: Overrides, model: nn.Module, ignored: Container[int]
) -> Iterator[str]:
    gathers = override.asked.compute is not None or override.asked.param is not None
    for fqn, parameter in _matched_parameters(match, model):
        # Parameters of another dtype than fp32 are frozen, and have no gradient to communicate.
        takes_dtype = stored_dtype(parameter) == torch.float32 or (gathers and parameter.is_floating_point())
        is_plain = parameter.dim() > 0 and not hasattr(parameter, "quant_state") and id(parameter) not in ignored
        first = overrides.of(fqn) if takes_dtype and is_plain else None
        if first is not None and first.index == override.index:
            yield fqn


def _listed(fqns: frozenset[str]) -> str:
    return some_of([fqn or "the root" for fqn in sorted(fqns)], 3)

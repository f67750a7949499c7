"""Divides the modules of a wrapped model into groups: by class and role, by depth, or by patterns of the config."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from zeroamp.hooks.precision.module_casts import class_name
from zeroamp.hooks.typed_groups import Holder
from zeroamp.module_dtypes.patterns import find_matches, known_names
from zeroamp.planning.groups import ParamPlan
from zeroamp.planning.parameter_uses import modules_around
from zeroamp.planning.plan import Plan
from zeroamp.policies.auto_wrap import has_forward
from zeroamp.policies.errors import ConfigError, nearest

BY_ROLE, BY_DEPTH = "class and role", "depth"
REST = "between the modules"
"""The group of the modules that no other group has: of residuals, softmax and the like. A pattern cannot name it,
because it stands for a module with all modules inside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleGroup:
    """Modules that run in one precision."""

    name: str
    modules: tuple[str, ...]
    """FQNs, also of modules inside of others."""
    patterns: Sequence[str]
    """What the config can name to keep exactly these modules in fp32. Empty if it cannot."""
    params: tuple[ParamPlan, ...]
    """The parameters that they own. A tied parameter may be of several groups."""


def find_groups(model: nn.Module, plan: Plan, asked: str | Sequence[str]) -> list[ModuleGroup]:
    """Return the groups: `BY_ROLE`, `BY_DEPTH`, or one per pattern, of which the first that matches a module applies.

    Raises:
        ConfigError: `asked` is something else, or a pattern matches nothing that an earlier one does not match.
    """
    named: Mapping[str, Sequence[str]]
    if asked == BY_ROLE:
        sizes = Counter[str]()
        for param in plan.params:
            for owner in filter(None, param.owner_fqns):  # the root is no role
                sizes[_role(owner, model.get_submodule(owner))] += param.numel
        del sizes["Linear"]  # it would match all of them
        named = {role: [role] for role, _ in sizes.most_common()} | {"Linear": ["Linear"]}
    elif asked == BY_DEPTH:
        named = _thirds(model, plan)
    elif isinstance(asked, list | tuple) and asked and all(isinstance(each, str) for each in asked):
        named = {pattern: [pattern] for pattern in asked}
    else:
        raise ConfigError(
            f"sensitivity(groups=) must be {BY_ROLE!r}, {BY_DEPTH!r} or a list of patterns, but is {asked!r}. "
            "Patterns are those of data_types.keep_in_fp32_modules."
        )
    run = [fqn for fqn, module in model.named_modules() if has_forward(module) and not isinstance(module, Holder)]
    group_of: dict[str, str] = {}
    exact: dict[str, Sequence[str]] = {}
    for name, patterns in named.items():
        found = {fqn for pattern in patterns for fqn in find_matches(model, pattern).modules} - {""}
        covered = [fqn for fqn in run if found & {*modules_around(fqn), fqn}]
        own = [fqn for fqn in covered if fqn not in group_of]
        if own:
            group_of |= dict.fromkeys(own, name)
            exact[name] = patterns if own == covered else ()
        elif asked != BY_ROLE:
            raise ConfigError(
                f"sensitivity(groups=): {name!r} matches no module of {class_name(model)} below the root that no "
                f"earlier pattern matches. {nearest(name, known_names(model))} Print model.named_modules() to see "
                "names and classes."
            )

    def name_of(owner: str) -> str:  # a container that does not run belongs to the module around it
        around = reversed([*modules_around(owner), owner])
        return next((group_of[fqn] for fqn in around if fqn in group_of), REST)

    owners = [(param, set(map(name_of, param.owner_fqns))) for param in plan.params]
    return [
        ModuleGroup(
            name=name,
            modules=tuple(fqn for fqn in run if group_of.get(fqn, REST) == name),
            patterns=patterns,
            params=tuple(param for param, names in owners if name in names),
        )
        for name, patterns in (exact | {REST: ()}).items()
    ]


def _role(fqn: str, module: nn.Module) -> str:
    """Return a pattern for modules like this one: its class, or the last parts of the name of a Linear."""
    *_, around, name = "", *fqn.split(".")
    if class_name(module) != "Linear" or name.isdecimal():
        return class_name(module)
    return f"{around}.{name}" if around and not around.isdecimal() else name


def _thirds(model: nn.Module, plan: Plan) -> dict[str, list[str]]:
    """Return the FQNs of the outermost units, without embeddings and heads, in three parts in their order."""
    units = {fqn for fqn in plan.units if fqn not in plan.own_units}
    blocks = [fqn for fqn, _ in model.named_modules() if fqn in units and not units & set(modules_around(fqn))]
    if not blocks:
        raise ConfigError(
            f"sensitivity(groups={BY_DEPTH!r}): {class_name(model)} has no units below its root. Name its blocks with "
            "auto_wrap_policy, or pass a list of patterns."
        )
    thirds: dict[str, list[str]] = {}
    for index, fqn in enumerate(blocks):
        third = ("first", "middle", "last")[3 * index // len(blocks)]
        thirds.setdefault(f"{third} third of the blocks", []).append(fqn)
    return thirds

"""Decides which modules become FSDP units by default, and which with an `auto_wrap_policy` (see docs/concepts.md).

[Note: Own units]
The root's parameters stay unsharded from the first op of a forward to the last op of its backward. In a language model
these are the embedding and the head: 6.3 GB for LLaMA-3 70B. At stage 3 they are units of their own:

* an embedding is resharded after its lookup, and not all-gathered in the backward, which reads indices only;
* a head is all-gathered after the last block, stays unsharded until its backward, and is reduced first, not last.

Each is all-gathered and reduced once per micro-batch, as with the root. At stages 0 to 2 parameters stay unsharded
until the optimizer step, so further units would only cost collectives. Tied weights stay with the root. So does a
module whose weight the model reads elsewhere, with `"zeroamp": {"own_units": false}`.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn

from zeroamp.policies.errors import ConfigError, WrapError, describe, repr_on_all_ranks, some_of
from zeroamp.policies.policy import NO_LEAF_MODULES, LeafModules

AutoWrapPolicy = type[nn.Module] | str | Iterable[type[nn.Module] | str] | None
"""A module class or class name, several of them, or None for the default."""


def find_units(
    model: nn.Module, auto_wrap_policy: AutoWrapPolicy = None, *, leaf_modules: LeafModules = NO_LEAF_MODULES
) -> list[str]:
    """Return the FQNs of the units below the root, children before parents. The root is always a unit, and not listed.

    By default the units are the modules of the classes in a transformers model's `_no_split_modules`. In other models
    they are the repeated blocks in the outermost `nn.ModuleList`s, or `nn.ModuleDict`s with numbers as keys. If there
    are none, the root is the only unit. With any policy, the modules of `leaf_modules` are units, and no module inside
    them is.

    Raises:
        WrapError: the policy matches no module of the model, or has a type that is not accepted.
        ConfigError: an item of `leaf_modules` matches no module of the model, or a module that cannot be a unit.
    """
    leaves = find_leaf_modules(model, leaf_modules)
    inside = {module for fqn in leaves for module in model.get_submodule(fqn).modules()}
    others = [fqn for fqn in _units_of_policy(model, auto_wrap_policy) if model.get_submodule(fqn) not in inside]
    return [fqn for fqn in (*leaves, *others) if fqn]


def _units_of_policy(model: nn.Module, auto_wrap_policy: AutoWrapPolicy) -> list[str]:
    if auto_wrap_policy is None:
        return _default_units(model)
    classes = _class_list(auto_wrap_policy)
    units = _units_of_classes(model, classes)
    unmatched = (each for each in classes if not any(_matches(module, each) for module in model.modules()))
    # Not the first one: the order of a set differs between ranks.
    asked = min((each if isinstance(each, str) else each.__name__ for each in unmatched), default=None)
    if asked is not None:
        names = sorted({type(module).__name__ for module in model.modules() if module is not model})
        raise WrapError(
            f"auto_wrap_policy {asked} matches no module of {type(model).__name__}. Name one of the model's classes, "
            f"{', '.join(names) or 'none below the root'}, or leave auto_wrap_policy out for the default."
        )
    for fqn in units:
        if not has_forward(module := model.get_submodule(fqn)):
            raise WrapError(
                f"auto_wrap_policy chose {fqn}, a {type(module).__name__}, which has no forward. Name the class of its "
                "children."
            )
    attentions = (module for module in model.modules() if isinstance(module, nn.MultiheadAttention))
    uncalled = {attention.out_proj for attention in attentions}  # the attention reads its weight
    return [fqn for fqn in units if fqn and model.get_submodule(fqn) not in uncalled]


def has_forward(module: nn.Module) -> bool:
    """Return whether a module has a forward. Containers such as ModuleList have none."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _class_list(asked: object) -> list[type[nn.Module] | str]:
    items: list[object] = [asked] if isinstance(asked, str | type) or not isinstance(asked, Iterable) else list(asked)
    classes: list[type[nn.Module] | str] = []
    others: list[str] = []
    for item in items or [asked]:
        if isinstance(item, str) or (isinstance(item, type) and issubclass(item, nn.Module)):
            classes.append(item)
        else:  # the `repr` of one of FSDP1's policies has a set
            is_plain = type(item).__module__ == "builtins"
            others.append(repr_on_all_ranks(item) if is_plain else f"a {type(item).__name__}")
    if others:
        example = 'For example auto_wrap_policy={"LlamaDecoderLayer"}.'
        raise WrapError(describe("auto_wrap_policy", min(others), "module classes or class names", example))
    return classes


def _matches(module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    if isinstance(wanted, str):
        return any(wanted in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}") for cls in type(module).__mro__)
    return isinstance(module, wanted)


def _units_of_classes(model: nn.Module, classes: Sequence[type[nn.Module] | str]) -> list[str]:
    found = [fqn for fqn, module in model.named_modules() if any(_matches(module, wanted) for wanted in classes)]
    return found[::-1]  # named_modules yields parents first


def _default_units(model: nn.Module) -> list[str]:
    # transformers lists the blocks of an architecture that must stay on one device. Some classes of the list belong to
    # other variants of the architecture, so a class without a module is no error.
    names = getattr(model, "_no_split_modules", None) or ()
    units = _units_of_classes(model, [str(name) for name in names])
    return [fqn for fqn in units if fqn] or list(_repeated_blocks(model, ""))


def _repeated_blocks(module: nn.Module, fqn: str) -> Iterator[str]:
    """Yield the FQNs of modules with parameters that have a sibling of their class in an outermost list of modules.

    A list is an `nn.ModuleList`, or an `nn.ModuleDict` whose keys are numbers, as torchtitan's. An `nn.ModuleDict` with
    other keys contains different parts of a model, such as two embeddings or two towers.
    """
    is_list = isinstance(module, nn.ModuleList) or (
        isinstance(module, nn.ModuleDict) and all(key.isdigit() for key in module)
    )
    num_siblings = Counter(type(child) for child in module.children())
    for name, child in module.named_children():
        child_fqn = f"{fqn}.{name}" if fqn else name
        is_block = is_list and num_siblings[type(child)] > 1
        if is_block and not isinstance(child, nn.ModuleList | nn.ModuleDict) and any(True for _ in child.parameters()):
            yield child_fqn
        else:
            yield from _repeated_blocks(child, child_fqn)


def find_leaf_modules(model: nn.Module, leaf_modules: LeafModules) -> list[str]:
    """Return the FQNs of the modules that `leaf_modules` names, in registration order.

    If one of these modules is inside another, only the outer one is returned.

    Raises:
        ConfigError: an item matches no module of the model, or a container without a forward.
    """
    chosen: set[nn.Module] = set()
    for key in ("classes", "names", "name_suffixes"):
        for wanted in getattr(leaf_modules, key):
            # A shared module has several names, and an item may match any of them.
            paths = model.named_modules(remove_duplicate=False)
            found = {module: fqn for fqn, module in paths if _is_leaf(key, wanted, fqn, module)}
            _refuse_leaf_modules(model, key, wanted, found)
            chosen |= found.keys()
    inside = {inner for module in chosen for inner in module.modules() if inner is not module}
    return [fqn for fqn, module in model.named_modules() if module in chosen - inside]


def _is_leaf(key: str, wanted: str, fqn: str, module: nn.Module) -> bool:
    if key == "classes":
        return _matches(module, wanted)
    return fqn == wanted or (key == "name_suffixes" and fqn.endswith(f".{wanted}"))


def _refuse_leaf_modules(model: nn.Module, key: str, wanted: str, found: Mapping[nn.Module, str]) -> None:
    where = f"zero_optimization.leaf_module.{key} {wanted!r}"
    for module, fqn in found.items():
        if not has_forward(module):
            raise ConfigError(
                f"{where} matches {fqn}, a {type(module).__name__}, which has no forward. Name the module that calls "
                "its children."
            )
    if not found:
        names = {type(module).__name__ if key == "classes" else fqn for fqn, module in model.named_modules()} - {""}
        near = get_close_matches(wanted, names, n=8) or sorted(names)
        raise ConfigError(
            f"{where} matches no module of {type(model).__name__}. Name one that it has, such as "
            f"{some_of(near) or 'none below the root'}, or leave the item out."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnUnits:
    """The FQNs of embeddings and heads that are units of their own. See [Note: Own units]."""

    lookups: tuple[str, ...] = ()
    """Embeddings that are resharded after their forward, and not all-gathered in the backward."""
    heads: tuple[str, ...] = ()
    """Heads, and embeddings with a forward of their own: unsharded from their forward to their backward."""

    def __bool__(self) -> bool:
        """Return whether there is an embedding or head that is a unit of its own."""
        return bool(self.lookups or self.heads)

    def __contains__(self, unit: object) -> bool:
        """Return whether a unit, by its FQN, is one of these."""
        return unit in self.lookups or unit in self.heads

    def __iter__(self) -> Iterator[str]:
        """Yield the FQNs of all: first the lookups, then the heads."""
        return iter((*self.lookups, *self.heads))


def find_own_units(
    model: nn.Module, inside_units: Container[nn.Module], min_numel: int, ignored: Collection[nn.Parameter] = ()
) -> OwnUnits:
    """Return the embeddings and heads that become units of their own. See [Note: Own units].

    In each transformers model these are the results of `get_input_embeddings` and `get_output_embeddings`. Elsewhere
    they are each `nn.Embedding`, and the last large module after all units, if it is a Linear.

    Args:
        model: a plain model.
        inside_units: the modules of all units and the modules inside them. They are never chosen.
        min_numel: the smallest number of elements of an embedding or head that is chosen.
        ignored: modules that own one of these parameters are not chosen: the parameter is not sharded, or only some
            ranks run the module.
    """
    num_paths = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    num_owners = Counter(id(p) for module in num_paths for p in module._parameters.values())
    unusable = {id(parameter) for parameter in ignored}

    def is_large(module: nn.Module) -> bool:
        own = list(module.parameters(recurse=False))
        return (
            sum(parameter.numel() for parameter in own) >= max(1, min_numel)
            and module not in inside_units
            and next(module.children(), None) is None
            and num_paths[module] == 1
            and all(num_owners[id(p)] == 1 and id(p) not in unusable and _is_plain(p) for p in own)
        )

    chosen: list[nn.Module] = []
    last: nn.Module | None = None  # the last large module after all units
    of_transformers: set[nn.Module] = set()
    for module in model.modules():
        if module in inside_units:
            last = None
        elif module not in of_transformers and (embedding := named_by(module, "get_input_embeddings")) is not None:
            of_transformers.update(module.modules())
            head = named_by(module, "get_output_embeddings")
            for found, cls in ((embedding, nn.Embedding), (head, nn.Linear)):
                # peft wraps a module that it adapts.
                chosen += [each for each in found.modules() if isinstance(each, cls)] if found is not None else []
        elif module not in of_transformers and isinstance(module, nn.Embedding):
            chosen.append(module)
        elif module not in of_transformers and is_large(module):
            last = module
    if isinstance(last, nn.Linear):
        chosen.append(last)
    names = {module: fqn for fqn, module in model.named_modules()}
    large = [module for module in dict.fromkeys(chosen) if is_large(module)]
    return OwnUnits(
        lookups=tuple(names[module] for module in large if _is_lookup(module)),
        heads=tuple(names[module] for module in large if not _is_lookup(module)),
    )


def _is_plain(parameter: nn.Parameter) -> bool:
    """Return whether a parameter can be sharded and is not a packed, quantized weight."""
    return parameter.dim() > 0 and parameter.is_floating_point() and not hasattr(parameter, "quant_state")


def _is_lookup(module: nn.Module) -> bool:
    """Return whether neither the output nor the backward of a module reads its table.

    The forward of a subclass, and a hook, may: a table of learned positions returns a slice of itself.
    """
    has_own_forward = type(module).forward is not nn.Embedding.forward or "forward" in vars(module)
    return not (has_own_forward or module._forward_hooks or module._forward_pre_hooks)


def named_by(module: nn.Module, method: str) -> nn.Module | None:
    """Return the result of `module`'s getter `method`, if `module` has the method and contains the result."""
    try:
        found = getattr(module, method, lambda: None)()
    except (AttributeError, NotImplementedError):  # raised by transformers models without such a module
        return None
    is_inside = isinstance(found, nn.Module) and any(found is inner for inner in module.modules())
    return found if is_inside else None

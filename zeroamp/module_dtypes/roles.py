"""Finds the output head and the routers of a model: the patterns "@lm_head" and "@router"."""

from collections.abc import Callable, Iterator

from torch import nn

from zeroamp.policies.auto_wrap import named_by
from zeroamp.policies.errors import ConfigError, some_of

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Attributes with the number of experts, of transformers' routers, experts and the modules around both."""


def modules_of_role(model: nn.Module, pattern: str) -> set[nn.Module]:
    """Return the modules of `model` that "@lm_head" or "@router" names.

    "@lm_head": what `get_output_embeddings` of a transformers model returns; without one, the modules named lm_head.
    "@router": the modules that are named gate or router, or whose class is a Router or Gate, beside a module `experts`.
    A router has a 2-D parameter with one row per expert.

    Raises:
        ConfigError: the model has no such module, or the pattern is another.
    """
    if pattern not in _ROLES:
        raise ConfigError(f'{pattern!r} is not a role of modules. Write "@lm_head" or "@router", or names or classes.')
    find, remedy = _ROLES[pattern]
    if found := set(find(model)):
        return found
    names = [name for name, module in model.named_modules() if _is_named(name) or isinstance(module, nn.Linear)]
    near = [name for name in names if _is_named(name)] or names[::-1]
    raise ConfigError(
        f"{pattern!r} names no module of {type(model).__name__}: {remedy}. Name the module itself: it has "
        f"{some_of(near) or 'no Linear'}."
    )


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    heads = (named_by(module, "get_output_embeddings") for module in model.modules())
    yield from (head for head in heads if head is not None)
    yield from (module for name, module in model.named_modules() if name.rpartition(".")[2] == "lm_head")


def _routers(model: nn.Module) -> Iterator[nn.Module]:
    for parent in model.modules():
        experts = getattr(parent, "experts", None)
        if not isinstance(experts, nn.Module):
            continue
        for name, module in parent.named_children():
            is_router = _is_named(name) or any(word in type(module).__name__ for word in ("Router", "Gate", "Gating"))
            if is_router and module is not experts and _rows(module) & _num_experts(parent, experts, module):
                yield module


def _is_named(name: str) -> bool:
    return name.rpartition(".")[2] in ("gate", "router")


def _rows(module: nn.Module) -> set[int]:
    return {len(parameter) for parameter in module.parameters() if parameter.dim() == 2}


def _num_experts(*modules: nn.Module) -> set[int]:
    """Return what may be the number of experts: attributes, lengths of lists, first dimensions of 3-D parameters."""
    own = {getattr(module, name, None) for module in modules for name in _NUM_EXPERTS}
    lengths = {len(module) for module in modules if isinstance(module, nn.ModuleList | nn.ModuleDict)}
    stacked = {len(parameter) for module in modules for parameter in module.parameters() if parameter.dim() == 3}
    return {number for number in own if isinstance(number, int)} | lengths | stacked


_ROLES: dict[str, tuple[Callable[[nn.Module], Iterator[nn.Module]], str]] = {
    "@lm_head": (_heads, "it has no get_output_embeddings, and no module named lm_head"),
    "@router": (_routers, 'it has no gate or router with one row per expert beside a module named "experts"'),
}

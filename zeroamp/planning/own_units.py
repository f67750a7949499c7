"""Chooses the embeddings and output heads that are FSDP units of their own at stage 3.

Reads the module tree, shapes and the source of forwards. A subclass of `nn.Embedding` with a forward of its own runs
once on meta tensors.

[Note: Own units]
The root's parameters stay unsharded from the first op of a forward to the last op of its backward. In a language model
these are the embedding and the head: 6.3 GB for LLaMA-3 70B. As units of their own they are unsharded when they are
used:

* an embedding is resharded after its lookup, and not all-gathered in the backward, which reads indices only;
* a head is all-gathered after the last block, stays unsharded until its backward, and is reduced first, not last.

Each is all-gathered and reduced once per micro-batch, as with the root. At stages 0 to 2 parameters stay unsharded
until the optimizer step, so further units would only cost collectives.

Ranks must agree on the units that run, and how often. So only modules that every forward of a language model calls are
chosen: the input and output embeddings of a transformers model; in other models each `nn.Embedding`, and the last large
module, if it is a Linear. If the source of a forward around the module reads the module's parameter, the parameter
stays with the root. Reads that the source does not show unshard the parameter: see `zeroamp.hooks.own_units`.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zeroamp.hooks._torch.dispatch import storage_key
from zeroamp.hooks.tensors import tensors_in
from zeroamp.hooks.tracing.fake_run import Replacements, tensors_replaced
from zeroamp.planning.parameter_uses import modules_around
from zeroamp.policies.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnUnits:
    """The FQNs of embeddings and heads that are units of their own: see [Note: Own units]."""

    lookups: tuple[str, ...] = ()
    """Embeddings that are resharded after their forward, and not all-gathered in the backward."""
    heads: tuple[str, ...] = ()
    """Heads, and embeddings whose backward reads the table: unsharded from their forward to their backward."""

    def __bool__(self) -> bool:
        """Return whether there is an embedding or head that is a unit of its own."""
        return bool(self.lookups or self.heads)

    def __contains__(self, unit: object) -> bool:
        """Return whether a unit, by its FQN, is one of these."""
        return unit in self.lookups or unit in self.heads

    def __iter__(self) -> Iterator[str]:
        """Yield the FQNs of all: first the lookups, then the heads."""
        return iter((*self.lookups, *self.heads))


@dataclass(slots=True)
class _Tree:
    """Facts about a model's modules and parameters, with which candidates are checked."""

    names: dict[nn.Module, str]
    num_paths: Counter[nn.Module]
    num_owners: Counter[nn.Parameter]
    in_units: set[nn.Module]
    threshold: int
    ignored: frozenset[nn.Parameter]
    last_unit: int = 0
    """Place of the last module of a unit in `names`."""
    places: dict[nn.Module, int] = field(default_factory=dict)

    def can_be_unit(self, module: nn.Module) -> bool:
        """Return whether a module is large enough, outside of all units, and the only owner of its parameters."""
        own = list(module.parameters(recurse=False))
        return (
            sum(parameter.numel() for parameter in own) >= max(1, self.threshold)
            and module not in self.in_units
            and next(module.children(), None) is None
            and self.num_paths[module] == 1
            and self.ignored.isdisjoint(own)
            and all(self.num_owners[parameter] == 1 and _is_plain(parameter) for parameter in own)
        )


def find_own_units(
    model: nn.Module,
    policy: Policy,
    units: Sequence[str],
    ignored_params: Iterable[nn.Parameter] = (),
) -> OwnUnits:
    """Return the embeddings and heads outside of `units` that become units of their own.

    There are none at stages 0 to 2, with `zeroamp.own_units` false, or if the root is the only unit. Modules that own
    one of `ignored_params` are left out.

    Args:
        model: a plain model.
        policy: its stage, `own_units` and `param_persistence_threshold` are used.
        units: FQNs of the units below the root.
        ignored_params: parameters that are not sharded.
    """
    if policy.stage != 3 or not policy.own_units or not units:
        return OwnUnits()
    tree = _tree_of(model, policy, units, ignored_params)
    lookups: list[str] = []
    heads: list[str] = []
    for module in dict.fromkeys(_candidates(model, tree)):
        fqn = tree.names[module]
        if not tree.can_be_unit(module) or _is_read_outside(model, fqn, module):
            continue
        is_lookup = isinstance(module, nn.Embedding) and _keeps_no_table(module)
        (lookups if is_lookup else heads).append(fqn)
    return OwnUnits(lookups=tuple(lookups), heads=tuple(heads))


def _tree_of(model: nn.Module, policy: Policy, units: Sequence[str], ignored: Iterable[nn.Parameter]) -> _Tree:
    names = {module: fqn for fqn, module in model.named_modules()}
    places = {module: place for place, module in enumerate(names)}
    in_units = {module for fqn in units for module in model.get_submodule(fqn).modules()}
    paths = [module for _, module in model.named_modules(remove_duplicate=False)]
    return _Tree(
        names=names,
        num_paths=Counter(paths),
        num_owners=Counter(p for module in names for p in module._parameters.values() if p is not None),
        in_units=in_units,
        threshold=policy.param_persistence_threshold,
        ignored=frozenset(ignored),
        last_unit=max(places[module] for module in in_units),
        places=places,
    )


def _is_plain(parameter: nn.Parameter) -> bool:
    """Return whether a parameter can be sharded and is not a packed, quantized weight."""
    return parameter.dim() > 0 and parameter.is_floating_point() and not hasattr(parameter, "quant_state")


def _candidates(model: nn.Module, tree: _Tree) -> Iterator[nn.Module]:
    """Yield the embeddings and heads of transformers models and of other modules."""
    others: list[nn.Module] = []
    yield from _walk(model, others, set())
    others = [module for module in others if not isinstance(module, nn.Embedding)]
    after = [module for module in others if tree.places[module] > tree.last_unit and tree.can_be_unit(module)]
    if after and isinstance(after[-1], nn.Linear):
        yield after[-1]


def _walk(module: nn.Module, others: list[nn.Module], seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield candidates in registration order; add the modules outside of transformers models to `others`."""
    if module in seen:
        return
    seen.add(module)
    if (embedding := _named_by(module, "get_input_embeddings")) is not None:
        head = _named_by(module, "get_output_embeddings")
        for found, cls in ((embedding, nn.Embedding), (head, nn.Linear)):
            # An adapter of PEFT wraps the module.
            yield from (inner for inner in found.modules() if isinstance(inner, cls)) if found is not None else ()
        return
    others.append(module)
    if isinstance(module, nn.Embedding):
        yield module
    for child in module.children():
        yield from _walk(child, others, seen)


def _named_by(module: nn.Module, method: str) -> nn.Module | None:
    """Return the result of `module`'s getter `method`, if `module` has the method and contains the result."""
    if not callable(getter := getattr(module, method, None)):
        return None
    try:
        found = getter()
    except (AttributeError, NotImplementedError):  # raised by transformers models without such a module
        return None
    is_inside = isinstance(found, nn.Module) and any(found is inner for inner in module.modules())
    return found if is_inside else None


def _is_read_outside(model: nn.Module, fqn: str, module: nn.Module) -> bool:
    """Return whether the source of a forward around `module` reads one of its parameters, such as `head.weight`.

    Losses in chunks do (TRL's and Liger's, for example), and models that tie weights by calling `F.linear`.
    """
    own_name = fqn.rpartition(".")[2]
    names = "|".join(re.escape(name) for name, _ in module.named_parameters(recurse=False))
    read = re.compile(rf"\b{re.escape(own_name)}\.({names})\b")
    around = [model, *(model.get_submodule(outer) for outer in modules_around(fqn))]
    return any(read.search(source) for outer in around for source in _sources_of_forward(outer))


def _sources_of_forward(module: nn.Module) -> Iterator[str]:
    forwards: list[object] = [type(module).forward, vars(module).get("forward")]
    for forward in forwards:
        function = getattr(forward, "func", forward)  # of a functools.partial
        code = getattr(getattr(function, "__func__", function), "__code__", None)  # of the outermost wrapper
        if code is None:
            continue
        try:
            yield inspect.getsource(code)
        except (OSError, TypeError):  # the function was made without a file
            continue


def _keeps_no_table(module: nn.Embedding) -> bool:
    """Return whether an embedding's table may be released after its forward: neither backward nor output reads it.

    For torch's own forward the result is True. The forward of a subclass is run on meta tensors, because it may return
    a slice of the table (a learned position table does). The result is False if that forward does not accept a tensor
    of indices, or if the module has forward hooks.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    if type(module).forward is nn.Embedding.forward and "forward" not in vars(module):
        return True
    fakes = Replacements(lambda tensor: torch.empty_like(tensor, device="meta"))
    retained: list[torch.Tensor] = []

    def retain(tensor: torch.Tensor) -> torch.Tensor:
        retained.append(tensor)
        return tensor

    run: Callable[[torch.Tensor], object] = module.forward
    with tensors_replaced(module, fakes), torch.enable_grad():
        for parameter in module.parameters():
            parameter.requires_grad_(True)
        try:
            with torch.autograd.graph.saved_tensors_hooks(retain, lambda tensor: tensor):
                output = run(torch.zeros(1, 2, dtype=torch.long, device="meta"))
        except Exception:  # the forward of a subclass may raise anything on such an input
            return False
        tables = {storage_key(parameter) for parameter in module.parameters()}
        return not any(storage_key(tensor) in tables for tensor in (*retained, *tensors_in(output)))

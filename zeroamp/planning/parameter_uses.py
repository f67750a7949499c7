"""Which modules own a parameter, under which names, and inside which units."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from zeroamp.policies.dtypes import short_name, stored_dtype
from zeroamp.policies.errors import WrapError


@dataclass(slots=True)
class ParameterUses:
    """The names, owning modules and units of one parameter."""

    parameter: nn.Parameter
    fqns: list[str]
    owners: dict[nn.Module, str]  # owner -> its first FQN
    chains: list[tuple[str, ...]]  # per use: FQNs of the units around it, outermost first

    def named_owners(self) -> list[tuple[nn.Module, str]]:
        """Return (owner, the name it has for the parameter)."""
        return [
            (owner, name)
            for owner in self.owners
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
            if parameter is self.parameter
        ]


def has_own_storage_class(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a tensor subclass. Subclasses of `nn.Parameter` hold plain tensors: False."""
    return not issubclass(type(parameter), nn.Parameter)


def find_uses(
    model: nn.Module, units: Iterable[str], merged: Mapping[str, Sequence[str]] | None = None
) -> list[ParameterUses]:
    """Return the names, owners and units of each parameter; `merged` has the FQNs of units of several modules.

    Walks the tree once, shared modules once per path.
    """
    unit_names = {model.get_submodule(fqn): unit for unit in units for fqn in (merged or {}).get(unit, (unit,))}
    chains: dict[str, tuple[str, ...]] = {}
    uses: dict[nn.Parameter, ParameterUses] = {}
    for module_fqn, module in model.named_modules(remove_duplicate=False):
        around = chains[module_fqn.rpartition(".")[0]] if module_fqn else ()
        # A unit is known by its module, not by its path: a block that is registered twice is one unit.
        chain = (*around, unit_names[module]) if module in unit_names else around
        chains[module_fqn] = chain
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            use = uses.setdefault(parameter, ParameterUses(parameter, [], {}, []))
            use.fqns.append(f"{module_fqn}.{name}" if module_fqn else name)
            use.owners.setdefault(module, module_fqn)
            use.chains.append(chain)
    return list(uses.values())


def innermost_common(chains: Sequence[tuple[str, ...]]) -> str:
    """Return the innermost unit that is around all uses; "" is the root."""
    common = ""
    for level in zip(*chains, strict=False):
        if len(set(level)) > 1:
            break
        common = level[0]
    return common


def refuse_unusable(use: ParameterUses) -> None:
    """Raise WrapError for a parameter that cannot be sharded, or trained as it is stored."""
    parameter, fqn = use.parameter, use.fqns[0]
    if isinstance(parameter, DTensor):
        raise WrapError(
            f"{fqn} is a DTensor of placements {parameter.placements}: tensor parallelism is not supported. Pass a "
            "model of plain parameters, without parallelize_module or a tp_plan."
        )
    if is_lazy(parameter):
        raise WrapError(f"{fqn} has no shape yet. Run one forward of the model before wrap_model.")
    if has_own_storage_class(parameter) and not hasattr(parameter, "fsdp_pre_all_gather"):
        raise WrapError(
            f"{fqn} is a {type(parameter).__name__}, a tensor subclass that does not tell FSDP2 how to all-gather it "
            "(fsdp_pre_all_gather). Wrap a model of plain parameters, and convert it afterwards if the subclass allows."
        )
    if parameter.requires_grad and stored_dtype(parameter) != torch.float32:
        raise WrapError(
            f"{fqn} is trainable, so it must be stored in fp32, bf16 or fp16, but is stored in "
            f"{short_name(parameter.dtype)}. Call .float() on its module before wrap_model, or freeze it."
        )


def children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield `module` and those inside, children before parents, each once: the order of `nn.Module.apply`."""
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if child not in seen:
                seen.add(child)
                yield from walk(child)
        yield module

    yield from walk(module)

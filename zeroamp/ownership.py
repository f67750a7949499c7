"""Which modules own a parameter, under which names, and inside which units."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(slots=True)
class ParameterUses:
    """Where one parameter hangs in the module tree."""

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


def find_uses(model: nn.Module, units: Iterable[str]) -> list[ParameterUses]:
    """Return where each parameter of `model` hangs; `units` are FQNs.

    Walks the tree once, shared modules once per path.
    """
    unit_names = {model.get_submodule(fqn): fqn for fqn in units}
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

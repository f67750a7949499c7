"""Predicts the order in which the units of a model run. Reads the module tree and `requires_grad` only."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from zeroamp.hooks.typed_groups import attachment_point
from zeroamp.planning.groups import GroupPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRun:
    """One run of a unit in a forward, and the runs of other units inside it."""

    unit: str
    """FQN; "" is the root."""
    inner: tuple["UnitRun", ...] = ()
    """The runs inside it, in their order."""
    input_requires_grad: bool
    """Whether the backward reaches the unit's inputs. If not, FSDP2 reduces the unit at the end of the backward."""
    output_requires_grad: bool
    """Whether the unit has a backward at all."""

    def forward_order(self) -> list[str]:
        """Return the units in the order in which their forwards begin, each once."""
        return list(dict.fromkeys(self._begins()))

    def backward_order(self) -> list[str]:
        """Return the units in the order in which their backwards begin: the unit whose forward ended last is first."""
        return list(dict.fromkeys(self._ends()))[::-1]

    def _begins(self) -> Iterator[str]:
        yield self.unit
        for run in self.inner:
            yield from run._begins()

    def _ends(self) -> Iterator[str]:
        for run in self.inner:
            yield from run._ends()
        yield self.unit


@dataclass(slots=True)
class _Open:
    """A run whose modules are still being walked."""

    path: str
    unit: str
    input_requires_grad: bool
    inner: list[UnitRun] = field(default_factory=list)

    def contains(self, path: str) -> bool:
        return self.path == "" or path.startswith(f"{self.path}.")


def run_order(
    model: nn.Module,
    units: Sequence[str],
    lookups: Collection[str] = (),
) -> UnitRun:
    """Return the predicted run of the root.

    Assumes that modules run in the order of their registration, that a module that is registered twice runs twice, that
    a module's own parameters are used before those of its children, and that batches need no gradient.

    Args:
        model: plain or wrapped.
        units: FQNs of the units below the root.
        lookups: units whose inputs are indices, which have no gradient.
    """
    unit_of = {model.get_submodule(unit): unit for unit in units}

    def owns_trainable(module: nn.Module) -> bool:
        return any(parameter.requires_grad for parameter in module.parameters(recurse=False))

    requires_grad = owns_trainable(model)
    stack = [_Open("", "", False)]
    for path, module in model.named_modules(remove_duplicate=False):
        if module is model:
            continue
        while not stack[-1].contains(path):
            _close(stack, requires_grad)
        if module in unit_of:
            unit = unit_of[module]
            stack.append(_Open(path, unit, requires_grad and unit not in lookups))
        requires_grad |= owns_trainable(module)
    while len(stack) > 1:
        _close(stack, requires_grad)
    root = stack[0]
    return UnitRun(unit="", inner=tuple(root.inner), input_requires_grad=False, output_requires_grad=requires_grad)


def _close(stack: list[_Open], requires_grad: bool) -> None:
    done = stack.pop()
    stack[-1].inner.append(
        UnitRun(
            unit=done.unit,
            inner=tuple(done.inner),
            input_requires_grad=done.input_requires_grad,
            output_requires_grad=requires_grad,
        )
    )


def tree_order(model: nn.Module, groups: Sequence[GroupPlan]) -> tuple[str, ...]:
    """Return the names of the groups in the module tree's order of their units and group holders."""
    places = {module: place for place, module in enumerate(model.modules())}

    def place(group: GroupPlan) -> tuple[int, bool]:
        if group.kind == "unit":
            return places[model.get_submodule(group.unit)], False
        owners = [model.get_submodule(fqn) for param in group.params for fqn in param.owner_fqns]
        point = attachment_point(owners, model)  # the holder is its last child
        return max(places[module] for module in point.modules()), True

    return tuple(group.name for group in sorted(groups, key=place))

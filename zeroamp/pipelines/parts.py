"""Joins the parts of a pipeline that one rank has, for its optimizer steps and checkpoints."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from weakref import finalize

import torch
from torch import nn

from zeroamp.hooks._torch.dtensor import root_of
from zeroamp.hooks.collectives.collective_calls import IssuedInStep
from zeroamp.hooks.collectives.traffic import CollectiveListener, IssuedCollective, Traffic, notify
from zeroamp.hooks.root_forward import ContextPlace, ForwardContext, RootForward
from zeroamp.policies.errors import StepError
from zeroamp.wrapping.state import WrapState, show_state, wrap_state
from zeroamp.wrapping.step_state import StepState


class Parts(nn.Module):
    """All parts of a model that this rank has. Its parameters, buffers and state have the names of the whole model."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        """Take wrapped parts.

        Raises:
            StepError: two parts have a parameter or buffer of the same name.
        """
        super().__init__()
        self.parts = nn.ModuleList(parts)
        counts = Counter(name for part in parts for name in part.state_dict())
        if twice := next((name for name, number in counts.items() if number > 1), ""):
            raise StepError(
                f"Two parts of this rank have a {twice}, so they cannot be told apart in a checkpoint. Pass each part "
                "once, and keep the names that parameters have in the whole model: do not number layers anew."
            )

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield those of all parts, by their names in the part."""
        for part in self.parts:
            yield from part.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield those of all parts, by their names in the part."""
        for part in self.parts:
            yield from part.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the states of all parts in one dict, by their names in the part."""
        state = super().state_dict(*args, **kwargs)  # parts.<number>.<name>
        return {name.split(".", 2)[2]: value for name, value in state.items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` returned."""
        keys = {name.split(".", 2)[2]: name for name in super().state_dict()}
        return super().load_state_dict({keys[name]: value for name, value in state_dict.items()}, strict, assign)


class _Forwards(RootForward):
    """The forwards of all parts: a context manager that is added here runs around each of them."""

    def __init__(self, states: Sequence[WrapState]) -> None:
        super().__init__()
        self._of_parts = [state.root_forward for state in states]

    def add(self, place: ContextPlace, context: ForwardContext) -> None:
        for each in self._of_parts:
            each.add(place, context)

    def remove(self, place: ContextPlace, context: ForwardContext) -> None:
        for each in self._of_parts:
            each.remove(place, context)

    def reset(self) -> None:
        for each in self._of_parts:
            each.reset()


class _ToAllParts:
    """Listens to the collectives of one part, and passes them to those who listen to all parts of the rank."""

    def __init__(self, part: WrapState, listeners: list[CollectiveListener]) -> None:
        self._part, self._listeners = part, listeners

    def on_collective(self, issued: IssuedCollective) -> None:
        """Pass a collective on, unless it is of a step that `Ledger.verify` runs."""
        if not self._part.step.is_observed:
            notify(self._listeners, issued)


def join(parts: Sequence[nn.Module]) -> Parts:
    """Return the wrapped parts of this rank as one model, with a `WrapState` of its own for optimizer steps.

    Raises:
        StepError: there is no part, or the parts are not wrapped over the same ranks with the same policy.
        WrapError: a part is not wrapped.
    """
    states = [wrap_state(part) for part in parts]
    if not states:
        raise StepError("PipelineStep got no part. Pass all wrapped parts that this rank has.")
    first, root = states[0], Parts(parts)
    if any(state.axes.whole != first.axes.whole for state in states):
        raise StepError("PipelineStep got parts that are wrapped over different ranks. Pass the same mesh for all.")
    if any(state.plan.policy != first.plan.policy for state in states):
        raise StepError("PipelineStep got parts that are wrapped with different policies. Pass the same one for all.")
    whole = first.axes.whole if first.axes.stages is None else root_of(first.axes.stages)
    units = [(f"{number}.{fqn}", unit) for number, state in enumerate(states) for fqn, unit in state.units.items()]
    traffic = Traffic()
    listeners: list[CollectiveListener] = [traffic]
    for state in states:
        state.listeners.append(to_all := _ToAllParts(state, listeners))
        finalize(root, state.listeners.remove, to_all)
    joined: WrapState = replace(
        first,
        root=root,
        plan=replace(first.plan, ignored=tuple(group for state in states for group in state.plan.ignored)),
        axes=replace(first.axes, whole=whole, is_joined=True),
        units={name.rstrip("."): unit for name, unit in units},
        gradients=[group for state in states for group in state.gradients],
        issued=IssuedInStep(),
        step=StepState(),
        root_forward=_Forwards(states),
        traffic=traffic,
        listeners=listeners,
        set_by_caller={},
        callbacks=[],
    )
    show_state(root, joined)
    return root

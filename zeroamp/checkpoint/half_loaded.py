"""Marks a model into which a checkpoint was loaded in part: what reads or trains it raises, until a load succeeds.

The marks are set before a load writes anything, and are removed at its end. So whatever ends a load midway, an error,
Ctrl-C or a lost rank, leaves them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import ref

from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroamp.policies.errors import CheckpointError, StepError
from zeroamp.wrapping.optimizer_hooks import refuse_steps
from zeroamp.wrapping.state import WrapState, hide_state, show_state, wrap_state

_ATTRIBUTE = "_zeroamp_half_loaded"
_AGAIN = "Call zeroamp.load_checkpoint again on every rank, until it succeeds."
_FAILURE = "load_checkpoint, which loaded only a part"


@dataclass(slots=True, weakref_slot=True)
class _HalfLoaded:
    """The marks of one model. Only the model refers to them."""

    state: WrapState
    failure: str | None
    """The failure of an optimizer step before the load."""
    parts: set[str] = field(default_factory=set)
    """What the load loads: the model, and parts of a training."""
    handles: list[RemovableHandle] = field(default_factory=list)
    is_loading: bool = True
    """Whether a load runs now, which reads and writes the model."""


def _mark_of(model: nn.Module) -> _HalfLoaded | None:
    found: _HalfLoaded | None = getattr(model, _ATTRIBUTE, None)
    return found


def state_of(model: nn.Module) -> WrapState:
    """Return `wrap_state(model)`, also of a model that was loaded in part."""
    mark = _mark_of(model)
    return wrap_state(model) if mark is None else mark.state


@contextmanager
def readable(state: WrapState) -> Iterator[None]:
    """Let a load read a model that was loaded in part."""
    mark = _mark_of(state.root)
    if mark is not None:
        mark.is_loading = True
    try:
        yield
    finally:
        if mark is not None:
            mark.is_loading = False


@contextmanager
def marked(state: WrapState, parts: set[str], recover: Callable[[], None] | None) -> Iterator[None]:
    """Mark the model of `state` until the context, which loads `parts`, has ended without an exception.

    `recover`: makes steps possible after an optimizer step that failed before. None: that failure stays.
    """
    root, step = state.root, state.step
    mark = _mark_of(root) or _HalfLoaded(state, step.failure)
    setattr(root, _ATTRIBUTE, mark)
    mark.parts |= parts
    mark.is_loading = True
    step.fail(_FAILURE)
    hide_state(root, f"was loaded in part: its last load_checkpoint did not end. {_AGAIN}")
    try:
        if not mark.handles:
            mark.handles.extend(_guards(mark))
        yield
        step.failure = mark.failure
        if recover is not None and mark.failure is not None:
            recover()
    except BaseException:
        step.fail(_FAILURE)
        mark.is_loading = False
        raise
    step.reset()
    for handle in mark.handles:
        handle.remove()
    delattr(root, _ATTRIBUTE)
    show_state(root, state)


def refuse_other_parts(state: WrapState, parts: set[str]) -> None:
    """Raise CheckpointError if a load of `parts` would leave others as an earlier load left them."""
    mark = _mark_of(state.root)
    if mark is not None and (missing := mark.parts - parts):
        raise CheckpointError(
            f"The last load_checkpoint of this model did not end, and may have loaded {' and '.join(sorted(missing))} "
            "in part. Call load_checkpoint with the same arguments as then."
        )


def _guards(mark: _HalfLoaded) -> Iterator[RemovableHandle]:
    """Register hooks that raise StepError where the model would be read or updated. Yields their handles."""
    to_mark = ref(mark)  # the hook of all optimizers must not keep a model that the program has dropped

    def refuse(*_args: object, **_kwargs: object) -> None:
        mark = to_mark()
        if mark is not None and not mark.is_loading:
            raise StepError(f"The model was loaded in part: its last load_checkpoint did not end. {_AGAIN}")

    for unit in mark.state.units.values():
        yield unit.register_forward_pre_hook(refuse, prepend=True)
        yield unit.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
    yield refuse_steps(mark.state.root, refuse)

"""`iter_weights`: yields the whole weights of a wrapped model one by one, for an inference engine or a file."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from torch import nn

from zeroamp.planning.mesh import is_first_rank
from zeroamp.policies.errors import CheckpointError, StepError
from zeroamp.policies.numbers import is_integer
from zeroamp.training.callbacks import Callback, Phase
from zeroamp.weights.buckets import one_by_one, whole_weights
from zeroamp.weights.layouts import joins_tensors, outline_of_model, publish
from zeroamp.weights.model_weights import find_weights
from zeroamp.wrapping.optimizer_hooks import refuse_steps
from zeroamp.wrapping.state import WrapState, hide_state, models_of, show_state, wrap_state


def iter_weights(
    model: nn.Module,
    dtype: torch.dtype | None = torch.bfloat16,
    *,
    bucket_bytes: int = 512 * 2**20,
    names: Literal["hf", "model"] = "hf",
    to: Literal["all", "first"] = "all",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of a wrapped model's parameters and persistent buffers, on the mesh's device.

    Every rank iterates to the end, between two optimizer steps: each bucket is all-gathered by all ranks. Between the
    first item and the end, or `close()`, an optimizer step, a load, a save, `sleep` and a second iterator are errors.
    Beside the shards at most two buckets, and the cast shards of one, exist if the caller retains no tensor. A tied
    parameter is yielded once. `zeroamp.integrations.peft.iter_merged_weights` merges adapters.

    Args:
        model: that `wrap_model` returned, at any stage, or `PipelineStep.model`, whose weights of all stages every rank
            yields.
        dtype: of floating-point parameters. Shards are cast before they are all-gathered. Buffers keep their dtype.
            None: the dtype of the shards.
        bucket_bytes: bytes of whole tensors that are all-gathered together. A larger tensor is a bucket of its own.
        names: "hf": names and layout of the published checkpoint, as `export_hf` writes them; other models keep their
            own names. "model": those of `state_dict()`.
        to: "all": every rank yields the tensors. "first": other ranks take part, and yield nothing.

    Raises:
        CheckpointError: an argument is not valid.
        StepError: at the first item, inside an optimizer step.
        PeerError: another rank ended, or does not iterate.
        WrapError: the model is not wrapped.
    """
    state = wrap_state(model)
    for argument, value, valid in (("names", names, ("hf", "model")), ("to", to, ("all", "first"))):
        if value not in valid:
            raise CheckpointError(f"iter_weights({argument}=) must be one of {valid}, but is {value!r}.")
    if not is_integer(bucket_bytes, at_least=1):
        raise CheckpointError(f"iter_weights(bucket_bytes=) must be an integer from 1 on, but is {bucket_bytes!r}.")
    buckets = _buckets_of_model
    if state.axes.is_joined:
        from zeroamp.weights.stages import weights_of_stages as buckets
    options = {"is_published": names == "hf", "to_all": to == "all"}
    items = _yielded(buckets("iter_weights", state, dtype, bucket_bytes, **options))
    for root in dict.fromkeys((state.root, *models_of(state))):
        items = reading(wrap_state(root), "iter_weights", items)
    return items


def reading(
    state: WrapState, method: str, items: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over `items`, which reads the weights of a wrapped model.

    From its first item until it is exhausted, closed or collected, the model's other functions of zeroamp, optimizer
    steps and `load_state_dict` raise an error that names `method`.

    Raises:
        StepError: inside an optimizer step, where some weights may be updated and others not.
    """
    root = state.root
    wrap_state(root)  # it may have gone to sleep, or another iterator may be open, since the call of `method`
    if state.step.is_open:
        raise StepError(f"{method} was called {state.step.phase.value}. Call it between two optimizer steps.")
    why = f"is being read by {method}. Iterate to its end, or call close() on the iterator, before anything else."
    name = type(root).__name__

    def refuse(*_args: object) -> None:
        raise StepError(f"The model (a {name}) {why}")

    callback = _BeforeUpdate(refuse)
    on_step = refuse_steps(root, refuse)
    on_load = root.register_load_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
    state.callbacks.append(callback)
    hide_state(root, why)
    try:
        yield from items
    finally:
        state.callbacks.remove(callback)
        on_step.remove()
        on_load.remove()
        show_state(root, state)


class _BeforeUpdate(Callback):
    """Raises before `TrainStep` changes anything, so that `step` can be called again: its optimizer would be late."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        self._refuse = refuse

    def on_phase_begin(self, phase: Phase, /) -> None:
        """Refuse the end of an optimizer step. A backward reads weights only."""
        if phase == "optimizer":
            self._refuse()


def _buckets_of_model(
    call: str, state: WrapState, dtype: torch.dtype | None, bucket_bytes: int, *, is_published: bool, to_all: bool
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield buckets of whole weights by name. They are empty on ranks that get no tensors."""
    root, mesh = state.root, state.axes.whole
    named = [
        (name, weight)
        for weight in find_weights(root)
        for name in (weight.written_names if is_published else weight.names[:1])
    ]
    outline = outline_of_model(root) if is_published else None
    for tensors in whole_weights(call, named, mesh, dtype, bucket_bytes, by_layer=joins_tensors(outline)):
        if not to_all and not is_first_rank(mesh):
            tensors.clear()
        publish(outline, tensors)
        yield tensors


def _yielded(buckets: Iterable[dict[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for tensors in buckets:
        yield from one_by_one(tensors)

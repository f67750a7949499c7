"""`iter_weights`: yields the whole weights of a wrapped model one by one, for an inference engine or a file.

[Note: Buckets]
The shards of a bucket are cast, and their all-gathers started, while the bucket before is used. So at most two buckets,
and the cast shards of one, exist beside the shards. transformers computes some published tensors from several of the
model, all of one layer: then the weights of a layer are in one bucket.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from zeroamp.hooks.collectives.collective_calls import peer_lost
from zeroamp.planning.mesh import device_of, is_first_rank, sharded_like
from zeroamp.policies.errors import CheckpointError, PeerError, StepError
from zeroamp.policies.numbers import is_integer
from zeroamp.training.callbacks import Callback, Phase
from zeroamp.weights.layouts import joins_tensors, outline_of_model, publish
from zeroamp.weights.model_weights import Weight, find_weights
from zeroamp.wrapping.optimizer_hooks import refuse_steps
from zeroamp.wrapping.state import WrapState, hide_state, record_state, refuse_joined, wrap_state

Named = tuple[str, Weight]
_LAYER = re.compile(r"(.*?\.\d+)\.")


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
        model: that `wrap_model` returned, at any stage.
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
    refuse_joined(state, "iter_weights")
    for argument, value, valid in (("names", names, ("hf", "model")), ("to", to, ("all", "first"))):
        if value not in valid:
            raise CheckpointError(f"iter_weights({argument}=) must be one of {valid}, but is {value!r}.")
    if not is_integer(bucket_bytes, at_least=1):
        raise CheckpointError(f"iter_weights(bucket_bytes=) must be an integer from 1 on, but is {bucket_bytes!r}.")
    items = _yielded(state.root, state.axes.whole, dtype, bucket_bytes, is_published=names == "hf", to_all=to == "all")
    return reading(state, "iter_weights", items)


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
        record_state(root, state)


class _BeforeUpdate(Callback):
    """Raises before `TrainStep` changes anything, so that `step` can be called again: its optimizer would be late."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        self._refuse = refuse

    def on_phase_begin(self, phase: Phase, /) -> None:
        """Refuse the end of an optimizer step. A backward reads weights only."""
        if phase == "optimizer":
            self._refuse()


def _yielded(
    root: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None, bucket_bytes: int, *, is_published: bool, to_all: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    named = [
        (name, weight)
        for weight in find_weights(root)
        for name in (weight.written_names if is_published else weight.names[:1])
    ]
    outline = outline_of_model(root) if is_published else None
    for tensors in whole_weights("iter_weights", named, mesh, dtype, bucket_bytes, by_layer=joins_tensors(outline)):
        if not to_all and not is_first_rank(mesh):
            tensors.clear()
        publish(outline, tensors)
        yield from one_by_one(tensors)


def one_by_one(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the items of a dict and remove them, so that the caller decides how long each tensor lives."""
    while tensors:
        name = next(iter(tensors))
        yield name, tensors.pop(name)


@torch.no_grad()
def whole_weights(
    call: str,
    named: Iterable[Named],
    mesh: DeviceMesh,
    dtype: torch.dtype | None,
    bucket_bytes: int,
    *,
    by_layer: bool = False,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield buckets of whole weights by name: see [Note: Buckets]. All ranks of `mesh` iterate to the end.

    Clear a bucket when it is used: the next but one is started when the generator resumes.

    Raises:
        PeerError: another rank does not take part. It names `call`.
    """
    started: dict[str, torch.Tensor] = {}
    with naming_lost_ranks(call):
        for bucket in _buckets(named, dtype, bucket_bytes, by_layer):
            whole = {name: _wait(started.pop(name)) for name in list(started)}
            started = {name: _start(weight, mesh, weight.dtype_in(dtype)) for name, weight in bucket}
            if whole:
                yield whole
        yield {name: _wait(started.pop(name)) for name in list(started)}


@contextmanager
def naming_lost_ranks(call: str) -> Iterator[None]:
    """Turn an error of the backend, by which a collective ended, into a PeerError that names `call`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PeerError) or not isinstance(peer_lost(error, None), PeerError):
            raise
        raise PeerError(
            f"{call} failed on rank {dist.get_rank()}: {str(error).strip()}. Another rank has ended, or did not call "
            f"{call}, which all ranks must call. Read the output of the other ranks, and restart from the last "
            "checkpoint."
        ) from error


def _buckets(
    named: Iterable[Named], dtype: torch.dtype | None, bucket_bytes: int, by_layer: bool
) -> Iterator[Sequence[Named]]:
    bucket: list[Named] = []
    num_bytes, last = 0, ""
    for name, weight in named:
        layer = found[1] if by_layer and (found := _LAYER.match(name)) else name
        size = weight.tensor.numel() * weight.dtype_in(dtype).itemsize
        if bucket and layer != last and num_bytes + size > bucket_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append((name, weight))
        num_bytes, last = num_bytes + size, layer
    yield bucket


def _start(weight: Weight, mesh: DeviceMesh, dtype: torch.dtype) -> torch.Tensor:
    """Start the all-gather of a weight. A weight that is not sharded is this rank's own.

    The shard is cast first, which moves fewer bytes. Rounding is per element, so the bits are the same.

    With gloo each all-gather ends here. If weights sharded along dimension 0 and along others are in flight together,
    torch 2.13 damages the heap (benchmarks/records/2026-11-29_async-redistribute_2-core-cpu).
    """
    device = device_of(mesh)
    local = weight.local.to(device, dtype)
    if not isinstance(weight.tensor, DTensor):
        return local
    sharded = sharded_like(local, weight.tensor)
    whole = [Replicate()] * sharded.device_mesh.ndim
    return sharded.redistribute(placements=whole, async_op=device.type != "cpu").to_local()


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor: `to_local` returns one that waits for its all-gather when an op reads it."""
    waiting = getattr(tensor, "wait", None)
    return tensor if waiting is None else waiting()

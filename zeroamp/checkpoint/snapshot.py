"""The state of training at one moment: tensors by name, and everything else as bytes."""

import io
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zeroamp.agreement import Agreement
from zeroamp.checkpoint.export_files import export_files
from zeroamp.checkpoint.random_state import random_state
from zeroamp.checkpoint.state import extra_states, model_tensors, optimizer_state
from zeroamp.mesh import device_of
from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.state import WrapState, reshard
from zeroamp.step import TrainStep
from zeroamp.step_checks import Scheduler, StatefulScheduler


@dataclass(slots=True)
class Snapshot:
    """What one rank saves."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """For torch.distributed.checkpoint, by name: sharded DTensors, and plain ones that all ranks have."""
    values: bytes = b""
    """Step counts, scheduler, the description of the optimizer: the same on all ranks."""
    own: bytes = b""
    """This rank's: random state, `extra`, modules' extra state, and plain tensors that differ between ranks."""
    files: dict[str, bytes] = field(default_factory=dict)
    """With these, the weights can be exported without the model."""


def take_snapshot(state: WrapState, train: TrainStep, extra: Any, ranks: Agreement) -> Snapshot:
    """Take the present state of training. `tensors` are the live ones.

    Raises:
        CheckpointError: on all ranks, where something on any cannot be saved.
        StepError: inside an accumulation window.
    """
    counts = train.state_dict()  # in a window, all ranks are
    reshard(
        state.root.modules()
    )  # after an evaluation at stage 1 or 2, the sharded parameters are not in their modules
    snapshot = Snapshot()

    def collect() -> dict[str, str]:
        optimizer = optimizer_state(train.optimizer, state.root)
        snapshot.tensors = {**model_tensors(state.root), **optimizer.tensors}
        values = {
            "train": counts,
            "scheduler": _scheduler_state(train.scheduler),
            "optimizer": optimizer.description,
        }
        snapshot.values = _to_bytes(values, "the state of optimizer and scheduler")
        snapshot.files = export_files(state.root)
        return {name: _digest(tensor) for name, tensor in snapshot.tensors.items() if not isinstance(tensor, DTensor)}

    digests = ranks.run(collect)
    differing = {name for of_rank in digests for name in of_rank if of_rank[name] != digests[0].get(name)}

    def pack() -> None:
        own = {name: snapshot.tensors[name] for name in sorted(differing)}
        content = {"random": random_state(device_of(state.mesh)), "tensors": own, "extra": extra}
        content["extra_states"] = extra_states(state.root)
        snapshot.own = _to_bytes(content, "extra, or a module's get_extra_state()")

    ranks.run(pack)
    return snapshot


def _scheduler_state(scheduler: Scheduler | None) -> dict[str, Any] | None:
    if scheduler is not None and not isinstance(scheduler, StatefulScheduler):
        found = f"a {type(scheduler).__name__} without state_dict and load_state_dict"
        raise CheckpointError(describe("the scheduler", found, "one with both, as torch's have", "Add them."))
    return None if scheduler is None else scheduler.state_dict()


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return sha256(content.numpy().tobytes()).hexdigest()


def _to_bytes(content: dict[str, Any], where: str) -> bytes:
    """Serialise; refuse what could not be read back without running code of the file."""
    file = io.BytesIO()
    try:
        torch.save(content, file)
        torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            describe(
                where,
                f"something that cannot be saved: {error}",
                "tensors, numbers, strings, None, and dicts, lists and tuples of them",
                "Convert it.",
            )
        ) from error
    return file.getvalue()

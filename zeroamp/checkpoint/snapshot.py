"""The state of training at one moment: tensors by name, and everything else as bytes."""

import io
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zeroamp.checkpoint.export import export_files
from zeroamp.checkpoint.optimizer_state import OPTIMIZER, optimizer_state
from zeroamp.checkpoint.state import extra_states, model_tensors
from zeroamp.hooks.random_state import random_state
from zeroamp.planning.mesh import device_of
from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.training.checks import Scheduler, StatefulScheduler
from zeroamp.training.step import TrainStep
from zeroamp.wrapping.rank_group import RankGroup
from zeroamp.wrapping.state import WrapState, reshard


@dataclass(slots=True)
class Snapshot:
    """What one rank saves."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """For torch.distributed.checkpoint, by name: sharded DTensors, and plain ones that all ranks have."""
    values: bytes = b""
    """Step counts, scheduler, the description of the optimizer: the same on all ranks."""
    own: bytes = b""
    """This rank's: random state, `extra`, modules' extra states, and plain tensors that differ between ranks."""
    files: dict[str, bytes] = field(default_factory=dict)
    """With these, the weights can be exported without the model."""


def take_snapshot(state: WrapState, train: TrainStep, extra: Any, ranks: RankGroup) -> Snapshot:
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
        return {name: _digest(tensor) for name, tensor in snapshot.tensors.items()}

    differing = _differing(ranks.run(collect))

    def pack() -> None:
        content = {
            "random": random_state(device_of(state.mesh)),
            "extra_states": extra_states(state.root),
            "tensors": {name: snapshot.tensors[name] for name in differing},
        }
        _to_bytes(content, "what a module's get_extra_state() returned")
        snapshot.own = _to_bytes({**content, "extra": extra}, "extra")

    ranks.run(pack)
    for name in differing:
        if name.startswith(OPTIMIZER):  # loaded by the same number of ranks only, each its own
            del snapshot.tensors[name]
    return snapshot


def _differing(digests: list[dict[str, str]]) -> list[str]:
    """Return the names of the tensors whose values are not the same on all ranks.

    Raises:
        CheckpointError: some ranks have a tensor that others have not, or buffers have other shapes.
    """
    names = sorted(set().union(*digests))
    forms = {name: {of_rank.get(name, "none").partition(" ")[0] for of_rank in digests} for name in names}
    for name in names:
        if "none" in forms[name] or (len(forms[name]) > 1 and not name.startswith(OPTIMIZER)):
            found = f"{' and '.join(sorted(forms[name]))}, depending on the rank"
            raise CheckpointError(describe(name, found, "the same on all ranks", "Make the ranks alike."))
    return [name for name in names if len({of_rank[name] for of_rank in digests}) > 1]


def _scheduler_state(scheduler: Scheduler | None) -> dict[str, Any] | None:
    """Return its class and state. Raises CheckpointError if it cannot say."""
    if scheduler is not None and not isinstance(scheduler, StatefulScheduler):
        found = f"a {type(scheduler).__name__} without state_dict and load_state_dict"
        raise CheckpointError(describe("the scheduler", found, "one with both, as torch's have", "Add them."))
    return None if scheduler is None else {"class": type(scheduler).__name__, "state": scheduler.state_dict()}


def _digest(tensor: torch.Tensor) -> str:
    """Return form and digest of a plain tensor; of a sharded one only that it is: every rank has another part."""
    if isinstance(tensor, DTensor):
        return "sharded"
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    form = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}".replace(" ", "")
    return f"{form} {sha256(content.numpy().tobytes()).hexdigest()}"


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

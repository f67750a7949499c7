"""Checkpoints of both strategies, in two forms.

| form | what | written by | read by |
|---|---|---|---|
| sharded | a folder of `save_checkpoint`, with Lightning's own values as `extra` | all ranks | these strategies |
| full | a file with the model's whole tensors, as DDP's | the first rank | all strategies, and `load_from_checkpoint` |
"""

import io
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from zeroamp.checkpoint.folder import find_checkpoints, is_checkpoint
from zeroamp.checkpoint.load import load_checkpoint
from zeroamp.checkpoint.save import save_checkpoint
from zeroamp.planning.mesh import device_of
from zeroamp.policies.errors import CheckpointError
from zeroamp.rank_group import RankGroup
from zeroamp.training.step import TrainStep
from zeroamp.wrapping.state import reshard, wrap_state

_REST = "lightning"


def local_path(path: Any) -> Path:
    """Return the path as a local one.

    Raises:
        CheckpointError: the path is a URL.
    """
    if "://" in str(path):
        raise CheckpointError(f"{path} is a URL. zeroamp reads and writes local files: pass a path that all ranks see.")
    return Path(path)


def is_sharded(path: Path) -> bool:
    """Return whether a checkpoint, or a folder of them, is at `path`."""
    return path.is_dir() and (is_checkpoint(path) or bool(find_checkpoints(path)))


def save_sharded(path: Path, root: nn.Module, train: TrainStep, rest: Mapping[str, Any]) -> None:
    """Write a checkpoint folder. All ranks call it. The first rank's `rest` is saved: any values for `torch.save`."""
    ranks = RankGroup.for_saving(wrap_state(root).axes.whole)

    def pack() -> torch.Tensor | None:
        if ranks.rank != 0:
            return None
        if path.is_file():
            path.unlink()
        file = io.BytesIO()
        torch.save(dict(rest), file)
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)

    packed: list[torch.Tensor | None] = []
    ranks.run(lambda: packed.append(pack()))
    save_checkpoint(path, root, train, extra={_REST: packed[0]}, keep=1)


def load_sharded(path: Path, root: nn.Module, train: TrainStep | None, weights_only: bool | None) -> dict[str, Any]:
    """Load a checkpoint folder, and return the saved `rest`. `train` None: only the model is loaded."""
    extra = load_checkpoint(path, root, train, load_lr_scheduler_states=False, extra_rank=0)
    packed = extra.get(_REST) if isinstance(extra, dict) else None
    if not isinstance(packed, torch.Tensor):
        raise CheckpointError(
            f"{path} was not saved by a Lightning strategy. Load it with zeroamp.load_checkpoint(folder, model, train)."
        )
    rest: dict[str, Any] = torch.load(
        io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=weights_only
    )
    return rest


def whole_tensors(values: Any, root: nn.Module) -> Any:
    """Return a state dict with whole tensors on the CPU of the first rank, and empty tensors on other ranks."""
    mesh = wrap_state(root).mesh
    device, is_first = device_of(mesh), mesh.get_rank() == int(mesh.mesh.flatten()[0])

    def whole(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: whole(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([whole(each) for each in value])
        if not isinstance(value, torch.Tensor):
            return value
        full = value.detach()
        if isinstance(full, DTensor):
            full = cast(DTensor, full.to(device)).full_tensor()
        return full.cpu().clone() if is_first else torch.empty(0)

    with torch.no_grad():
        return whole(values)


def model_state(root: nn.Module) -> dict[str, Any]:
    """Return the state dict of the wrapped model, with its sharded parameters."""
    reshard(root.modules())
    state: dict[str, Any] = root.state_dict()
    return state


def write_full(path: Path, checkpoint: Mapping[str, Any], root: nn.Module) -> None:
    """Write a file on the first rank. All ranks call it."""
    ranks = RankGroup.for_saving(wrap_state(root).axes.whole)

    def write() -> None:
        if is_sharded(path):
            shutil.rmtree(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.draft")
        torch.save(dict(checkpoint), draft)
        draft.replace(path)

    ranks.on_first(write)


def read_full(path: Path, root: nn.Module, weights_only: bool | None) -> dict[str, Any]:
    """Read a checkpoint file on all ranks, mapped into CPU memory."""

    def read() -> dict[str, Any]:
        if not path.is_file():
            raise CheckpointError(
                f"{path} must be a checkpoint file, or a folder that a zeroamp strategy wrote, but is neither. Check "
                "the path."
            )
        found: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        return found

    loaded: list[dict[str, Any]] = []
    RankGroup.for_saving(wrap_state(root).axes.whole).run(lambda: loaded.append(read()))
    return loaded[0]


def load_full_model(root: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load whole tensors into the shards. Every rank passes the complete `state`."""
    reshard(root.modules())
    options = StateDictOptions(full_state_dict=True, strict=strict)
    set_model_state_dict(root, dict(state), options=options)

"""Finds the files of a DeepSpeed checkpoint, refuses unsupported kinds, and reads a file safely.

    FOLDER/latest                                          the tag of the newest checkpoint
    FOLDER/TAG/mp_rank_00_model_states.pt                  stages 0 to 2: the module, written by rank 0
    FOLDER/TAG/zero_pp_rank_R_mp_rank_00_model_states.pt   stage 3: one per rank
    FOLDER/TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   stages 1 to 3: one per rank

The files are pickles. `load_archive` builds only tensors and plain containers, and an `Inert` for each of the few
classes of DeepSpeed.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from zeroamp.deepspeed.archives import Inert, load_archive, unsafe_names
from zeroamp.policies.errors import CheckpointError, describe, some_of
from zeroamp.weights.untrusted_files import leads_out, read_regular

T = TypeVar("T")

_MAX_TAG_BYTES = 4096
DEEPSPEED_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Classes that DeepSpeed 0.19.8 pickles besides tensors and plain containers. They are neither imported nor called."""

CONVERT = (
    "If DeepSpeed is installed and you trust the file, convert the weights with the zero_to_fp32.py beside it "
    "(--safe_serialization) and load its output with zeroamp.load_hf."
)
"""The remedy in the errors for checkpoints that are refused."""


def unreadable(where: str, found: object, valid: str) -> CheckpointError:
    """Return the error for a checkpoint that has another form than those of DeepSpeed's ZeRO."""
    return CheckpointError(describe(where, found, valid, CONVERT))


_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_00_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_00_optim_states\.pt")
_OTHER_KINDS = (
    (re.compile(r"(?:layer_\d+_)?expert_.*|expp_rank_.*"), "experts sharded over ranks (DeepSpeed's MoE)"),
    (re.compile(r"layer_.*"), "layers of a pipeline-parallel model"),
    (re.compile(r".*mp_rank_(?!00_)\d+_.*"), "shards of a tensor-parallel model"),
    (re.compile(r"offloaded_tensors"), "optimizer state that was offloaded to NVMe"),
    (re.compile(r"zero"), "a universal checkpoint"),
)


@dataclass(frozen=True, slots=True)
class Entries:
    """A mapping in a file, whose values are untrusted: reading a key checks the type of its value."""

    file: str
    """The file's name and the keys that lead to this mapping, for errors."""
    values: dict[Any, Any]

    def get(self, key: str | int, kind: type[T] | tuple[type[T], ...]) -> T:
        """Return the value of `key`.

        Raises:
            CheckpointError: the key is missing, or its value has another type.
        """
        value = self.values.get(key)
        if not isinstance(value, kind):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            found = f"a {type(value).__name__}" if key in self.values else "missing"
            raise unreadable(f"{self.file}: {key}", found, f"a {' or '.join(k.__name__ for k in kinds)}")
        return value

    def optional(self, key: str, kind: type[T]) -> T | None:
        """Return the value of `key`, or None if it is missing or None."""
        return None if self.values.get(key) is None else self.get(key, kind)

    def each(self, key: str, kind: type[T]) -> list[T]:
        """Return the list at `key`, after checking that all elements are of `kind`."""
        values = self.get(key, list)
        for value in values:
            if not isinstance(value, kind):
                found = f"a list with a {type(value).__name__}"
                raise unreadable(f"{self.file}: {key}", found, f"a list of {kind.__name__}")
        return values

    def inside(self, key: str | int) -> "Entries":
        """Return the mapping at `key`."""
        return Entries(f"{self.file}: {key}", self.get(key, dict))


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFiles:
    """The files of one checkpoint."""

    path: Path
    """The folder of the tag."""
    model: list[Path] = field(default_factory=list)
    """One file; at stage 3 one per rank, in rank order."""
    optimizer: list[Path] = field(default_factory=list)
    """One per rank, in rank order; none at stage 0."""


def find_files(folder: str | os.PathLike[str], tag: str | None) -> CheckpointFiles:
    """Return the files of the checkpoint `tag` in `folder`. None: the tag in the file `latest`.

    Raises:
        CheckpointError: there is no such checkpoint, some of its files are missing, or its kind is not supported.
    """
    path = _tag_folder(Path(folder), tag)
    names = sorted(entry.name for entry in path.iterdir())
    for name in names:
        for pattern, kind in _OTHER_KINDS:
            if pattern.fullmatch(name):
                raise CheckpointError(
                    f"{path / name} holds {kind}. zeroamp reads only checkpoints of ZeRO stages 0 to 3 with data "
                    f"parallelism alone. {CONVERT}"
                )
    model, optimizer = _by_rank(path, names, _MODEL), _by_rank(path, names, _OPTIMIZER)
    if not model:
        raise CheckpointError(
            f"{path} must have mp_rank_00_model_states.pt or zero_pp_rank_0_mp_rank_00_model_states.pt, but has "
            f"{some_of(names) or 'no files'}. Pass the folder that engine.save_checkpoint was given, and a tag in it."
        )
    if len(model) not in (1, len(optimizer)):
        raise CheckpointError(
            f"{path} must have a file of model states and one of optimizer states per rank, but has {len(model)} and "
            f"{len(optimizer)}. Copy the files of all ranks into one folder."
        )
    return CheckpointFiles(path=path, model=model, optimizer=optimizer)


def _tag_folder(folder: Path, tag: str | None) -> Path:
    if tag is None:
        latest = folder / "latest"
        try:
            tag = read_regular(latest, _MAX_TAG_BYTES).decode(errors="replace").strip()
        except OSError as error:
            raise CheckpointError(
                f"{latest}, which names the newest tag, cannot be read ({error.strerror}). Pass the tag: "
                'tag="global_step100".'
            ) from error
    tags = sorted(entry.name for entry in folder.iterdir() if entry.is_dir()) if folder.is_dir() else []
    if tag not in tags:
        raise CheckpointError(f"{folder} has no checkpoint {tag!r}. Pass one of its tags: {some_of(tags) or 'none'}.")
    return folder / tag


def _by_rank(path: Path, names: list[str], pattern: re.Pattern[str]) -> list[Path]:
    matches = [match for name in names if (match := pattern.fullmatch(name))]
    ranks = sorted(int(match["rank"] or 0) for match in matches)
    if ranks != list(range(len(ranks))):
        found = some_of([match[0] for match in matches])
        raise CheckpointError(
            f"{path} must have one file per rank, counted from 0, but has {found}. Copy the files of all ranks "
            "here, and remove those that an earlier checkpoint of this tag left."
        )
    return [path / match[0] for match in sorted(matches, key=lambda match: int(match["rank"] or 0))]


def read_file(path: Path) -> Entries:
    """Return the content of a file: plain containers, and tensors that are mapped from the file, not read.

    Raises:
        CheckpointError: the file is damaged, or refers to a class or function other than torch's own and
            `DEEPSPEED_CLASSES`. Such a class is not imported.
    """
    inert: list[Any] = [(Inert, name) for name in DEEPSPEED_CLASSES]
    if leads_out(path):
        raise CheckpointError(f"{path} is a link that leads out of its folder. Copy the file into the folder.")
    with torch.serialization.safe_globals(inert):
        if found := unsafe_names(path):
            raise CheckpointError(
                f"{path} was not read: besides {_PLAIN}, it refers to {', '.join(found)}, which were not imported. "
                f"{CONVERT} If they belong to your client state and you trust the file, allow them around the call: "
                "torch.serialization.safe_globals([...])."
            )
        values = load_archive(path, str(path), mmap=True)
    if not isinstance(values, dict):
        raise unreadable(str(path), f"a {type(values).__name__}", "a dict")
    return Entries(str(path), values)


_PLAIN = "tensors, plain containers, and DeepSpeed's loss scaler, stage and addresses"

"""Replaces the weights in a folder. After a failure or a kill at any moment, a load finds all old or all new weights.

[Note: Replacement]
All files of an export are first written to the disk in a draft, a folder inside the folder. Then:

1. The files that an index lists are moved. If the folder has weights, these files have the id of the export in their
   names, so an index that is there, or that a reader has read, never lists files of two exports.
2. The config files are moved.
3. The index or the single file is moved. `from_pretrained` and `load_hf` prefer a single file to an index, so an old
   single file is removed after the new index has its place. With the last of these, the new weights count.
4. The files of the old weights are removed.

The writer of a draft locks a file in it. The lock ends with the writer's process, so the next export can distinguish
drafts of killed exports from drafts in progress.
"""

import fcntl
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeroamp.policies.errors import CheckpointError, error_text

logger = logging.getLogger("zeroamp")

MANIFEST = "zeroamp.json"
"""A folder with this file is a checkpoint. Exports refuse to write into it."""
_DRAFT, _WRITER = ".export-", ".writer"


def sync_to_disk(path: Path) -> None:
    """Write the content of a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def weight_files(folder: Path, stem: str) -> list[Path]:
    """Return the weights of exports in a folder, indexes first. `save_pretrained` gives such names too."""
    of_export = re.compile(rf"{stem}((-[0-9a-f]{{8}})?-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
    found = [path for path in folder.iterdir() if of_export.fullmatch(path.name)]
    return sorted(found, key=lambda path: (path.suffix != ".json", path))


@contextmanager
def open_draft(folder: Path) -> Iterator[Path]:
    """Create a draft in a folder, and remove it at the end. Also removes the drafts that killed exports left.

    Raises:
        CheckpointError: the folder is a checkpoint, or an action in the context failed. The folder has its old weights.
    """
    draft = folder / f"{_DRAFT}{uuid.uuid4().hex[:8]}"
    try:
        if (folder / MANIFEST).exists():
            raise CheckpointError(f"{folder}: it is a checkpoint. Pass another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"{_DRAFT}*"):
            if _has_no_writer(path):
                with suppress(OSError):
                    shutil.rmtree(path, ignore_errors=True)
        draft.mkdir()
        with _locking(draft / _WRITER):
            yield draft
    except Exception as error:
        why = error_text(error).rstrip(".")
        raise CheckpointError(
            f"The weights are not exported: {why}. Weights that {folder} had before are unchanged."
        ) from error
    finally:
        with suppress(OSError):  # raised in spite of `ignore_errors` if a folder cannot be closed
            shutil.rmtree(draft, ignore_errors=True)
        if os.path.lexists(draft):
            logger.warning("%s could not be removed. The next export into the folder removes it.", draft)


def export_id(draft: Path) -> str:
    """Return the id of an export, which no other export has."""
    return draft.name.removeprefix(_DRAFT)


def _has_no_writer(draft: Path) -> bool:
    """Return whether the process that wrote a draft has ended. False if that is not known."""
    with suppress(OSError), _locking(draft / _WRITER) as is_locked:
        return is_locked
    return False


@contextmanager
def _locking(path: Path) -> Iterator[bool]:
    """Lock a file, which is created, inside the context. Yields False if another process has locked it.

    Also yields False on a file system without locks.
    """
    with path.open("ab") as file:
        is_locked = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            is_locked = False
        try:
            yield is_locked
        finally:
            with suppress(OSError):  # closing alone would leave it locked by forked processes (data loaders)
                fcntl.flock(file, fcntl.LOCK_UN)


def replace_weights(draft: Path, folder: Path, stem: str) -> None:
    """Move the files of a draft into its folder, and remove the old weights: see [Note: Replacement].

    Raises:
        OSError: the weights in the folder are the old ones. Old files that cannot be removed are a warning instead.
    """
    single, index = (folder / f"{stem}.safetensors{end}" for end in ("", ".index.json"))
    last = index if (draft / index.name).exists() else single
    shards = [folder / path.name for path in weight_files(draft, stem) if path.name != last.name]
    others = {_WRITER, last.name, *(path.name for path in shards)}
    configs = [folder / path.name for path in draft.iterdir() if path.name not in others]
    for path in (*configs, last):
        sync_to_disk(draft / path.name)
    try:
        for path in (*shards, *configs):
            (draft / path.name).replace(path)
        sync_to_disk(folder)
        (draft / last.name).replace(last)
        if last == index and single.exists():
            sync_to_disk(folder)
            single.unlink()
    except BaseException as error:  # the operation that raised may have been done
        if (draft / last.name).exists() or (last == index and single.exists()):
            for path in (last, *shards):
                if not (draft / path.name).exists():
                    path.unlink(missing_ok=True)
            raise
        if not isinstance(error, OSError):
            raise
    try:
        sync_to_disk(folder)
        for path in weight_files(folder, stem):
            if path != last and path not in shards:
                path.unlink()
    except OSError as error:
        logger.warning(
            "The weights are exported to %s, but the removal of older files there ended with %s. from_pretrained and "
            "load_hf do not read these files, and the next export removes them.",
            folder,
            error_text(error),
        )

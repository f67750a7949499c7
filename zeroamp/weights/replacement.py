"""Replaces the weights in a folder. After a failure or a kill at any moment, a load finds all old or all new weights.

[Note: Replacement]
All files of an export are first written to the disk in a draft, a folder inside the folder. Then:

1. The files that an index lists are moved. If the folder has weights, these files have the id of the export in their
   names, so an index that is there, or that a reader has read, never lists files of two exports.
2. The config files are moved.
3. The index or the single file is moved. `from_pretrained` and `load_hf` prefer a single file to an index, so an old
   single file is removed after the new index has its place. With the last of these, the new weights count.
4. The files of the old weights are removed.
"""

import logging
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeroamp.policies.errors import CheckpointError, error_text
from zeroamp.weights.drafts import Draft, remove_leftovers, sync_to_disk

logger = logging.getLogger("zeroamp")

MANIFEST = "zeroamp.json"
"""A folder with this file is a checkpoint. Exports refuse to write into it."""
_DRAFT = ".export-"


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
    draft = None
    try:
        if (folder / MANIFEST).exists():
            raise CheckpointError(f"{folder}: it is a checkpoint. Pass another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder, _DRAFT)
        draft = Draft.make(folder / f"{_DRAFT}{uuid.uuid4().hex[:8]}")
        yield draft.path
    except Exception as error:
        why = error_text(error).rstrip(".")
        raise CheckpointError(
            f"The weights are not exported: {why}. Weights that {folder} had before are unchanged."
        ) from error
    finally:
        if draft is not None:
            draft.discard()


def export_id(draft: Path) -> str:
    """Return the id of an export, which no other export has."""
    return draft.name.removeprefix(_DRAFT)


def replace_weights(draft: Path, folder: Path, stem: str) -> None:
    """Move the files of a draft into its folder, and remove the old weights: see [Note: Replacement].

    Raises:
        OSError: the weights in the folder are the old ones. Old files that cannot be removed are a warning instead.
    """
    single, index = (folder / f"{stem}.safetensors{end}" for end in ("", ".index.json"))
    last = index if (draft / index.name).exists() else single
    shards = [folder / path.name for path in weight_files(draft, stem) if path.name != last.name]
    others = {last.name, *(path.name for path in shards)}
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

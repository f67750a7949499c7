"""Files that are on the disk when the call returns (fsync), not only in the memory of the system."""

import os
import uuid
from pathlib import Path


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file; when this returns, its content is on the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(path: Path, content: bytes) -> None:
    """Put a file in the place of another by one rename; when this returns, it and its name are on the disk."""
    beside = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        write_durably(beside, content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


METADATA = ".metadata"
"""Torch's, of the shards."""
VALUES = "train.pt"
"""What is the same on all ranks."""


def rank_file(rank: int) -> str:
    """Return the name of the file with what one rank has of its own."""
    return f"rank_{rank:05d}.pt"

"""Whether files can be written into a folder, asked before the work that makes what they hold."""

import tempfile
from pathlib import Path


def check_folder(folder: Path) -> None:
    """Write into the folder, or into the nearest one above that is there, and leave nothing behind.

    Raises:
        OSError: as writing into the folder, which is made then, would.
    """
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    with tempfile.TemporaryDirectory(dir=nearest):
        pass

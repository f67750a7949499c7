"""The library's source files, by layer."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_files(layer):
    """Return the files of a layer and its subpackages; links, which lead to other layers, are not followed."""
    folders = os.walk(ROOT / layer, followlinks=False)
    return [Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".py")]

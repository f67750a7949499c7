"""Builds the package that pyproject.toml describes, and restores its two links where they are missing.

`zeroamp/hooks` and `zeroamp/policies` are symbolic links to the top-level folders. A zip download, or a checkout with
`core.symlinks=false`, has small text files in their place: setuptools would build a package without them.
"""

import re
import sys
from contextlib import suppress
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

for name in ("hooks", "policies"):
    link, restored = FOLDER / "zeroamp" / name, FOLDER / "zeroamp" / f"{name}.link"
    if link.is_file() and link.read_text().strip() == f"../{name}":
        with suppress(OSError):  # a file system without links
            restored.symlink_to(f"../{name}")
            restored.replace(link)
    if not (link / "__init__.py").is_file():
        sys.exit(
            f"zeroamp/{name} must be a symbolic link to ../{name} (or a copy of that folder), but is not, and could "
            f"not be made one. Build on a file system that has symbolic links, or from the sdist. Or replace "
            f"zeroamp/{name} by a copy of the folder {name}."
        )

from setuptools import setup  # noqa: E402

# A package index has only the text of README.md. Relative links become the names of files, which the sdist has.
readme = re.sub(r"^!\[.*\n\n", "", (FOLDER / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
readme = re.sub(r"\[([^]]+)\]\(\1\)", r"`\1`", readme)
readme = re.sub(r"\[([^]]+)\]\(([^):]+)\)", r"\1 (`\2`)", readme)

setup(long_description=readme, long_description_content_type="text/markdown")

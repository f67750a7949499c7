"""Builds the package that pyproject.toml describes; refuses a tree whose links are missing.

`zeroamp/hooks` and `zeroamp/policies` are symbolic links to the top-level folders. A zip download, or a checkout on
Windows without `core.symlinks`, has small text files in their place: setuptools would build a package without them.
"""

import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

for name in ("hooks", "policies"):
    if not (FOLDER / "zeroamp" / name / "__init__.py").is_file():
        sys.exit(
            f"zeroamp/{name} must be a symbolic link to ../{name} (or a copy of that folder), but is not. This tree "
            f"was made without symbolic links, by a zip download or a checkout with core.symlinks=false. Clone it "
            f"with git on a system that has them, or build from the sdist. Or replace zeroamp/{name} by a copy of "
            f"the folder {name}."
        )

from setuptools import setup  # noqa: E402

# A package index has only the text of README.md. Relative links become the names of files, which the sdist has.
readme = re.sub(r"^!\[.*\n\n", "", (FOLDER / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
readme = re.sub(r"\[([^]]+)\]\(\1\)", r"`\1`", readme)
readme = re.sub(r"\[([^]]+)\]\(([^):]+)\)", r"\1 (`\2`)", readme)

setup(long_description=readme, long_description_content_type="text/markdown")

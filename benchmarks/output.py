"""Where a benchmark's Markdown goes: to the terminal, and with `--out FOLDER` to a file there too."""

import argparse
import platform
import sys
from pathlib import Path

import torch


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="folder that the Markdown is written to as well")


def emit(name: str, parts: list[str], out: Path | None) -> None:
    """Print the command, the versions and `parts`; write them to `out/name.md`."""
    command = f"python -m benchmarks.{name} {' '.join(sys.argv[1:])}".strip()
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    text = "\n\n".join([f"`{command}`", versions, *parts]) + "\n"
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.md").write_text(text)

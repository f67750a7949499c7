"""Prints a benchmark's Markdown, and with `--out FOLDER` writes it to a file in FOLDER too."""

import argparse
import platform
import sys
from pathlib import Path

import torch


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="also write the Markdown into this folder")


def emit(name: str, parts: list[str], out: Path | None) -> None:
    """Print the command, the versions and `parts`; write them to `out/name.md`."""
    command = f"python -m benchmarks.{name} {' '.join(sys.argv[1:])}".strip()
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    text = "\n\n".join([f"`{command}`", versions, *parts]) + "\n"
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.md").write_text(text)

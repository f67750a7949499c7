"""Writes the record of a measurement: README.md with command, versions, hardware and tables, and all values as JSON."""

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

import zeroamp
from benchmarks.peers.options import Options
from benchmarks.peers.processes import backend_name


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a Markdown table. Missing cells are empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[row.get(name, "") for name in columns] for row in rows]
    return tabulate(cells, headers=columns, tablefmt="github", disable_numparse=True)


def command(module: str) -> str:
    """Return the command that started this measurement, for the root of the repository."""
    arguments = " ".join(f"'{word}'" if " " in word else word for word in sys.argv[1:])
    threads = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} " if "OMP_NUM_THREADS" in os.environ else ""
    launcher = f"torchrun --nproc-per-node {dist.get_world_size()}" if "TORCHELASTIC_RUN_ID" in os.environ else "python"
    return f"{threads}{launcher} -m {module} {arguments}".rstrip()


def versions() -> dict[str, str]:
    """Return name -> version, of Python, torch, zeroamp, DeepSpeed and CUDA."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "zeroamp": zeroamp.__version__}
    try:
        found["deepspeed"] = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        found["deepspeed"] = "not installed"
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def hardware(device: torch.device) -> str:
    """Return a description of the hardware."""
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} CPU cores, {torch.get_num_threads()} thread(s) a rank"
    load = f"load {os.getloadavg()[0]:.1f} at the end"
    gpu = f"{torch.cuda.get_device_name(device)}, " if device.type == "cuda" else ""
    return f"{gpu}{cores}, {load}"


def head(module: str, options: Options, device: torch.device) -> list[str]:
    """Return the paragraphs that every record begins with."""
    ranks = f"{dist.get_world_size()} ranks on {backend_name(device, options)}; {options.described()}."
    found = ", ".join(f"{name} {version}" for name, version in versions().items())
    return [f"`{command(module)}`", ranks, f"{hardware(device)}. {found}."]


def write(folder: Path, *, title: str, body: str, name: str, values: dict[str, Any]) -> None:
    """Write README.md and `name`.json into a folder, and create the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(f"# {title}\n\n{body}\n", encoding="utf-8")
    (folder / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

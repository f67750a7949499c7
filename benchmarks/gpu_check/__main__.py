"""Check zeroamp on one GPU in at most ten minutes, in seven parts. Each part prints one line with a verdict.

With two or more GPUs, an eighth part checks NCCL between them, in three minutes more.

    python -m benchmarks.gpu_check [--part NAME] [--device cuda|cpu] [--small] [--out FOLDER]

Each part runs in its own process with a time limit. A part that crashes or hangs fails, and the other parts run. A part
that cannot begin before the time of the whole check is over is "not measured". The exit code is 1 if a part failed.

With --device cpu --small the same code runs on a CPU in minutes, and prints what it did not measure. --plant plants a
fault that a part must find (`benchmarks/gpu_check/faults.py`). --out writes a record.
"""

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.gpu_check.faults import FAULTS, VARIABLE, planted
from benchmarks.gpu_check.verdict import Place, Result
from benchmarks.peers.record import command, hardware, markdown, versions


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part: its module, its time limit in seconds on a GPU, and what it checks."""

    module: str
    limit_s: float
    what: str


PARTS = MappingProxyType(
    {
        "correctness": Part(module="correctness", limit_s=140, what="one rank at every stage against plain torch"),
        "disturbance": Part(module="disturbance", limit_s=110, what="the same bits while streams are disturbed"),
        "two-ranks": Part(module="two_ranks", limit_s=60, what="two gloo ranks on one GPU"),
        "host-waits": Part(module="host_waits", limit_s=50, what="how often the host waits for the device"),
        "sums": Part(module="sums", limit_s=90, what="the sum over ranks: bits and bandwidth"),
        "step-times": Part(module="step_times", limit_s=140, what="step time, tokens/s and MFU beside FSDP2 and DDP"),
        "memory": Part(module="memory", limit_s=80, what="allocated and reserved memory beside plan"),
        "nccl": Part(module="nccl", limit_s=180, what="ranks with a GPU each: layouts, saves, reductions"),
    }
)
WHOLE_S = 560.0
"""Seconds for all parts together on one GPU. With the installation before them, at most ten minutes."""
SEVERAL_GPUS_S = 180.0
"""Seconds more on a machine with several GPUs, for `nccl`."""
ON_CPU = 5
"""Factor of all time limits on a CPU, which may have other work."""
GRACE_S = 2.0
"""Seconds to wait for a killed process."""


def run_part(name: str, place: Place, *, limit_s: float) -> Result:
    """Run a part in its own process, and return its result: FAILED if it crashes or does not end in time."""
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        arguments = [sys.executable, "-m", "benchmarks.gpu_check", "--part", name, "--device", place.device.type]
        arguments += ["--answer", str(answer), "--parent", str(os.getpid()), *(["--small"] if place.small else [])]
        with log.open("w") as written:
            # In a new session, so that the processes that the part starts can be ended with it.
            process = subprocess.Popen(arguments, stdout=written, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        said = log.read_text(errors="replace")
        if code is None:
            return Result(verdict="FAILED", reason=f"did not end in {limit_s:.0f} s", values={"log": said[-8000:]})
        if code != 0 or not answer.exists():
            last = (said.strip().splitlines() or ["it printed nothing"])[-1]
            return Result(verdict="FAILED", reason=f"ended with code {code}: {last}", values={"log": said[-8000:]})
        return Result(**json.loads(answer.read_text()))


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process and all processes that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(GRACE_S)


def end_with(parent: int) -> None:
    """End this process and all processes that it has started, soon after its parent has ended or was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def answer_part(name: str, place: Place, answer: Path) -> None:
    """Run a part in this process and write its result."""
    planted("hang")
    planted("crash")
    if place.on_cuda:
        torch.cuda.set_device(0)
    try:
        result = importlib.import_module(f"benchmarks.gpu_check.{PARTS[name].module}").run(place)
    except torch.OutOfMemoryError:
        traceback.print_exc()
        held = torch.cuda.max_memory_allocated() / 2**30
        reason = f"out of memory: it needs more than {held:.0f} GiB"
        result = Result(verdict="not measured", reason=reason, values={"log": traceback.format_exc()[-8000:]})
    except Exception as error:
        traceback.print_exc()
        # The error's own message: the last line of a log may not contain it.
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        result = Result(verdict="FAILED", reason=text, values={"log": traceback.format_exc()[-8000:]})
    answer.write_text(json.dumps(result.as_json()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; may be given several times")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="small sizes: for a CPU, and for tests")
    parser.add_argument("--limit", type=float, help="seconds of each part, in place of its own limit")
    parser.add_argument("--whole", type=float, help=f"seconds of all parts, in place of {WHOLE_S:.0f} on a GPU")
    parser.add_argument("--plant", choices=FAULTS, help="plant a fault that a part must find")
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)  # in the process of one part
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # the process that waits for it
    given = parser.parse_args()
    place = Place(device=torch.device(given.device), small=given.small)
    if given.answer is not None:
        end_with(given.parent)
        answer_part(given.part[0], place, given.answer)
        return
    if given.plant is not None:
        os.environ[VARIABLE] = given.plant
    if place.on_cuda and not torch.cuda.is_available():
        sys.exit(
            "--device is cuda, but torch sees no CUDA device. Pass --device cpu --small to run the check on a CPU."
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running part is ended too
    of_one = WHOLE_S if place.on_cuda and torch.cuda.device_count() < 2 else WHOLE_S + SEVERAL_GPUS_S
    whole = given.whole or of_one * (1 if place.on_cuda else ON_CPU)
    results, seconds = _run_all(given.part or list(PARTS), place, limit=given.limit, whole=whole)
    if given.out is not None:
        write_record(given.out, results, seconds, place)
    sys.exit(any(result.verdict == "FAILED" for result in results.values()))


def _run_all(
    names: list[str], place: Place, *, limit: float | None, whole: float
) -> tuple[dict[str, Result], dict[str, float]]:
    begin = time.monotonic()
    results, seconds = {}, {}
    for name in names:
        left, started = whole - (time.monotonic() - begin), time.monotonic()
        if left < 1:
            results[name] = Result(verdict="not measured", reason=f"the {whole:.0f} s of the whole check are over")
        else:
            usual = PARTS[name].limit_s * (1 if place.on_cuda else ON_CPU)
            results[name] = run_part(name, place, limit_s=min(limit or usual, left))
        seconds[name] = time.monotonic() - started
        print(results[name].line(name), flush=True)
    return results, seconds


def write_record(folder: Path, results: dict[str, Result], seconds: dict[str, float], place: Place) -> None:
    """Write README.md, with the lines and all tables, and values.json, with everything that was measured."""
    found = ", ".join(f"{name} {version}" for name, version in environment(place).items())
    parts = [f"`{command('benchmarks.gpu_check')}`", f"{hardware(place.device)}. {found}."]
    if VARIABLE in os.environ:
        parts.append(f"With a planted fault: {os.environ[VARIABLE]}.")
    overview = [
        {
            "part": name,
            "what": PARTS[name].what,
            "verdict": result.verdict,
            "s": f"{seconds[name]:.0f}",
            "": result.reason,
        }
        for name, result in results.items()
    ]
    parts.append(markdown(overview))
    for name, result in results.items():
        for title, rows in result.tables.items():
            parts += [f"## {name}: {title}", markdown(rows)]
        if "log" in result.values:
            parts += [f"## {name}: the end of its output", f"```\n{result.values['log'][-3000:].strip()}\n```"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("# zeroamp on a GPU\n\n" + "\n\n".join(parts) + "\n", encoding="utf-8")
    values = {
        "environment": environment(place),
        "parts": {name: {**result.as_json(), "seconds": round(seconds[name], 1)} for name, result in results.items()},
    }
    (folder / "values.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def environment(place: Place) -> dict[str, str]:
    """Return the versions of what the check runs on, and the device."""
    found = {**versions(), "system": platform.machine()}
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = "not installed"
    if place.on_cuda:
        properties = torch.cuda.get_device_properties(0)
        found["GPUs"] = str(torch.cuda.device_count())
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["device"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB, {properties.multi_processor_count} SMs"
        )
    return found


if __name__ == "__main__":
    main()

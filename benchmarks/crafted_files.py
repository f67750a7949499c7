"""Gives crafted files to all functions that read files, and records how each reading ended.

    python -m benchmarks.crafted_files --out FOLDER [--only WORD] [--every N]

Every variant is read in a process of its own, a rank of a world of one. FOLDER gets `crafted_files.jsonl` and
`crafted_files.md`. A right ending is a CheckpointError (for configs a ConfigError) without control characters in its
text, or the good files' values. No code may run, memory may grow by `MAX_MIB` at most, and `TIMEOUT_S` is the limit.
"""

import argparse
import gc
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate

import zeroamp
from benchmarks.crafted import checkpoints, others
from benchmarks.crafted.readers import ESCAPES, READERS, make_good
from benchmarks.crafted.variant import MARK, Variant
from benchmarks.output import add_out, emit

MAX_MIB = 250
"""Most growth of memory. The largest file that is read whole has 32 MiB of JSON; bombs have 256 MiB and more."""
TIMEOUT_S = 30


@dataclass(kw_only=True)
class Ending:
    """How one reading ended."""

    reader: str
    name: str
    is_right: bool = False
    ended: str = "killed"
    """"refused", "accepted", "raised" (another exception), "killed" (it took too long, or crashed)."""
    text: str = ""
    peak_mib: float = 0.0
    """Growth of the process's resident memory while it read."""
    was_executed: bool = False
    seconds: float = 0.0


def variants() -> list[Variant]:
    """Return all variants."""
    return list(chain(checkpoints.variants(), others.variants()))


def run(chosen: list[Variant], told: Callable[[Ending], object]) -> list[Ending]:
    """Read each variant, and call `told` with how it ended."""
    root = Path(tempfile.mkdtemp(prefix="crafted-"))
    logging.getLogger("zeroamp").addHandler(logging.NullHandler())
    gc.freeze()
    try:
        (root / "good").mkdir()
        if _forked(lambda: make_good(root / "good"), root / "made", 120) != 0:
            raise AssertionError(f"expected the good files, got {(root / 'made').read_text()}")
        endings = []
        for variant in chosen:
            endings.append(_ending(variant, root))
            told(endings[-1])
        return endings
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _ending(variant: Variant, root: Path) -> Ending:
    good, folder = READERS[variant.reader].good, root / "variant" / "folder"
    shutil.copytree(root / "good" / good, folder)
    shutil.copy(root / "good" / "expected.pt", folder.parent)
    variant.craft(folder)
    ending, told = Ending(reader=variant.reader, name=variant.name), root / "told"
    begun_s = time.monotonic()
    status = _forked(lambda: told.write_text(json.dumps(_read(variant, folder))), root / "failed", TIMEOUT_S)
    ending.seconds = round(time.monotonic() - begun_s, 2)
    if status == 0:
        ending.ended, ending.text, ending.peak_mib = json.loads(told.read_text())
    elif (root / "failed").exists():
        ending.text = (root / "failed").read_text()
    ending.was_executed = bool(list(root.rglob(MARK)))
    valid = "refused" if variant.ends == "refused" else "accepted"
    is_plain = not ESCAPES & set(ending.text)
    ending.is_right = ending.ended == valid and not ending.was_executed and ending.peak_mib <= MAX_MIB and is_plain
    shutil.rmtree(folder.parent)
    return ending


def _read(variant: Variant, folder: Path) -> tuple[str, str, float]:
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _resident_kib("VmRSS")
    refusal = zeroamp.ConfigError if variant.reader == "policy_from_config" else zeroamp.CheckpointError
    try:
        is_good = READERS[variant.reader].read(folder)
        ended, text = ("accepted", "") if is_good else ("other values", "")
    except refusal as error:
        ended, text = "refused", str(error)
    except BaseException as error:
        ended, text = "raised", f"{type(error).__name__}: {error}"
    return ended, text.replace(str(folder), "FOLDER")[:2000], round((_resident_kib("VmHWM") - before) / 1024, 1)


def _resident_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _forked(action: Callable[[], object], failure: Path, timeout_s: float) -> int:
    """Run `action` in a forked process that is a rank of its own. Returns 0, or the process's wait status."""
    failure.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(int(timeout_s))  # ends the process even if it waits for something
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            action()
            status = 0
        except BaseException as error:
            failure.write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def _markdown(endings: list[Ending]) -> list[str]:
    wrong = [ending for ending in endings if not ending.is_right]
    counts = Counter((ending.reader, ending.ended) for ending in endings)
    kinds = sorted({ended for _, ended in counts})
    rows = [[reader, *(counts[reader, kind] or "" for kind in kinds)] for reader in READERS]
    each = [[e.reader, e.name, e.ended, e.peak_mib, e.text.replace("|", "\\|")[:160]] for e in endings]
    peak_mib, seconds = max(e.peak_mib for e in endings), max(e.seconds for e in endings)
    summary = (
        f"{len(endings)} variants, {len(wrong)} wrong, {sum(e.was_executed for e in endings)} executions. Largest "
        f"growth of memory: {peak_mib:.0f} MiB. Longest: {seconds:.1f} s."
    )
    return [
        summary,
        tabulate(rows, headers=["reader", *kinds], tablefmt="github"),
        *(f"WRONG: {e.reader}, {e.name}: {e.ended} {e.text}" for e in wrong),
        tabulate(each, headers=["reader", "variant", "ended", "MiB", "text"], tablefmt="github"),
    ]


def main() -> None:
    """Run the campaign. The exit status is 1 if any reading ended wrongly."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_out(parser)
    parser.add_argument("--only", default="", help="variants with this word in reader or name")
    parser.add_argument("--every", type=int, default=1, help="read only every N-th variant")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [v for v in variants() if arguments.only in f"{v.reader}: {v.name}"][:: arguments.every]
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
    path = Path(os.devnull) if arguments.out is None else arguments.out / "crafted_files.jsonl"
    with path.open("w") as file:
        endings = run(chosen, lambda ending: print(json.dumps(asdict(ending)), file=file, flush=True))
    emit("crafted_files", _markdown(endings), arguments.out)
    if not all(ending.is_right for ending in endings):
        sys.exit("some variants ended wrongly")


if __name__ == "__main__":
    main()

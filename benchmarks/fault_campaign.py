"""Breaks training runs in every known way, restarts them, and counts losses. There must be none.

    python -m benchmarks.fault_campaign --kills 100 --others 5 --seed 0 --out FOLDER

FOLDER gets `faults.json`, with every attempt, and `faults.md`, also if SIGTERM ends the campaign early. Kinds of faults
that this machine or user cannot make are listed with the reason.
"""

import argparse
import gc
import itertools
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults import cable, disk, folders, kills, restarts
from benchmarks.faults.attempt import Attempt, Kind, Runs
from benchmarks.faults.disk import NotPossibleHereError
from benchmarks.faults.processes import ForkedRank, at_end
from benchmarks.faults.record import write_record

_OTHERS: dict[str, Kind] = {
    "hanging rank": kills.stopped,
    "SIGTERM": kills.terminated,
    "SIGTERM handled": kills.preempted,
    "export": kills.exporting,
    "resharding": folders.resharded,
    "torchrun": restarts.restarted,
    "foreign files": folders.shared_with_strangers,
    "cable": cable.cut,
    "two writers": kills.two_writers,
    "disk full": disk.full,
    "disk full for a while": disk.full_for_a_while,
    "file size limit": disk.file_too_large,
    "read-only": disk.read_only,
    "damaged file": disk.damaged,
    "only one damaged": disk.only_one_damaged,
    "pointer": disk.pointer,
}
_KINDS = kills.KILLS | _OTHERS
_NEED_MOUNTS = ("disk full", "disk full for a while", "read-only")
_NEED_NETWORKS = ("cable",)


def main() -> None:
    """Run the campaign. The exit status is 1 if anything was lost."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    gc.freeze()  # forks then leave the memory of all modules shared
    begun_s = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="faults-"))
    runs = Runs(root, arguments.seed, arguments.timeout_s)
    skipped = _impossible()
    kinds = _KINDS if arguments.only is None else {arguments.only: _KINDS[arguments.only]}
    attempts: list[Attempt] = []
    with at_end(lambda: write_record(arguments.out, attempts, skipped, time.monotonic() - begun_s)):
        both = (_kill(runs, kinds, arguments.kills), _try_others(runs, kinds, skipped, arguments.others))
        for pair in itertools.zip_longest(*both):
            attempts.extend(attempt for attempt in pair if attempt is not None)
    num_losses = sum(len(attempt.losses) for attempt in attempts)
    if num_losses:
        sys.exit(f"{num_losses} losses; their files are in {root}")
    shutil.rmtree(root)


def _impossible() -> dict[str, str]:
    """Return kind of fault that cannot be made here -> the reason."""
    skipped = {}
    for kinds, prepare in ((_NEED_MOUNTS, disk.have_own_mounts), (_NEED_NETWORKS, cable.try_networks)):
        try:
            prepare()
        except NotPossibleHereError as error:
            skipped |= dict.fromkeys(kinds, str(error))
    return skipped


def _kill(runs: Runs, kinds: dict[str, Kind], num_kills: int) -> Iterator[Attempt]:
    """Make attempts of the kinds of kills in turn, until a rank was killed in `num_kills` of them."""
    for name, kind in itertools.cycle([item for item in kinds.items() if item[0] in kills.KILLS]):
        if num_kills <= 0:
            return
        attempt = _try(name, kind, runs)
        num_kills -= bool(attempt.moments)
        yield attempt


def _try_others(runs: Runs, kinds: dict[str, Kind], skipped: dict[str, str], times: int) -> Iterator[Attempt]:
    """Make `times` attempts of every other kind, in turn."""
    names = [name for name in kinds if name in _OTHERS and name not in skipped]
    for _ in range(times):
        yield from (_try(name, kinds[name], runs) for name in names)


def _try(name: str, kind: Kind, runs: Runs) -> Attempt:
    attempt = kind(runs)
    print(f"{name}: {attempt.job}; {'; '.join(attempt.story)}; {attempt.losses or 'nothing lost'}", flush=True)
    runs.clear(attempt)
    return attempt


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="attempts in which a rank is killed -9")
    parser.add_argument("--others", type=int, default=5, help="attempts of every other kind")
    parser.add_argument("--only", choices=_KINDS, help="one kind of fault alone")
    parser.add_argument("--timeout-s", type=float, default=20.0, help="timeout of every collective")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except ForkedRank as fork:
        rank = fork
    else:
        sys.exit()
    rank.run()  # outside of the handler, so that the campaign's frames are not on the stack

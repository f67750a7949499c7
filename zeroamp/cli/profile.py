"""`zeroamp profile`: runs a training script and records some of its optimizer steps."""

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from zeroamp.reporting.profiling import Profile


def profile(
    script: Annotated[
        Path, typer.Argument(help="The training script.", exists=True, dir_okay=False, show_default=False)
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments.")] = None,
    *,
    out: Annotated[Path, typer.Option("--out", help="Folder for the traces, one per rank.")] = Path("traces"),
    wait: Annotated[int, typer.Option("--wait", min=0, help="Optimizer steps to let pass first.")] = 1,
    warmup: Annotated[int, typer.Option("--warmup", min=1, help="Steps to warm the profiler up.")] = 1,
    active: Annotated[int, typer.Option("--active", min=1, help="Steps to record.")] = 3,
    compress: Annotated[bool, typer.Option("--gz", help="Write rank0.json.gz.")] = False,
) -> None:
    """Run a training script, and write a trace of some optimizer steps of its first TrainStep.

    torchrun --nproc-per-node 2 -m zeroamp profile --out traces train.py --lr 1e-4

    The script runs to its end. The first rank prints its ranges with their times.
    """
    recording = Profile(out, wait=wait, warmup=warmup, active=active, compress=compress)
    with recording, _as_main(script, arguments or []):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise
    if recording.rank == 0:
        typer.echo(f"{recording}\n\n{recording.path}")


@contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Let a script find its arguments and its neighbours, as `python script.py` does."""
    before = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path = before

"""The command `zeroamp report`: runs side by side, from the files that `RunReport` wrote."""

from pathlib import Path
from typing import Annotated

import typer

from zeroamp.cli.options import messages_to_stderr
from zeroamp.reporting.saved_runs import plot, read_run, table


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN.jsonl...", help="Files of RunReport.", show_default=False)],
    *,
    picture: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw loss, norm, tokens/s and memory.")
    ] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="The table as Markdown.")] = False,
) -> None:
    """Print a table of one or several runs, side by side, also of those that still go on."""
    with messages_to_stderr(0):
        read = [read_run(path) for path in runs]
        typer.echo(table(read, "github" if as_markdown else "simple"))
        if picture is not None:
            plot(read, picture)
            typer.echo(f"wrote {picture}", err=True)

"""Options that the commands share, and how they log and print errors to stderr."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from zeroamp.cli.axis_sizes import AxisSizes, axis_sizes
from zeroamp.policies.errors import ZeroAmpError

logger = logging.getLogger("zeroamp")

ConfigPath = Annotated[Path, typer.Argument(help="The config, a JSON file.", show_default=False)]
WorldSize = Annotated[
    int | None,
    typer.Option(
        "--world-size", metavar="N", min=1, help="Ranks of the run, for keys that depend on them and for bytes."
    ),
]
MESH_HELP = "Axes of the mesh, such as dp=8,tp=4,cp=2 (docs/meshes.md). They replace --world-size."
GpusPerNode = Annotated[int, typer.Option("--gpus-per-node", min=1, help="GPUs joined by the faster links.")]
Auto = Annotated[
    list[str] | None, typer.Option("--auto", metavar="KEY=VALUE", help='Value of a key that is "auto"; repeatable.')
]
AutoWrap = Annotated[
    list[str] | None, typer.Option("--auto-wrap", metavar="CLASS", help="Class of the units; repeatable.")
]
Inputs = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        metavar="FUNCTION",
        help="module:function or file.py:function of (batch, seq) that returns the forward's arguments.",
    ),
]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE.html", help="Also write a self-contained page (5 MB); needs plotly."),
]
Verbosity = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        show_default=False,
        help="Log more to stderr. Twice: also the traceback of an error.",
    ),
]
_MODEL_HELP = (
    "A folder with a transformers config.json, or package.module:factory, or path/to/file.py:factory. A factory is "
    "imported and called: it runs that code."
)
Model = Annotated[str, typer.Option("--model", metavar="FOLDER_OR_FACTORY", help=_MODEL_HELP, show_default=False)]
OptionalModel = Annotated[str | None, typer.Option("--model", metavar="FOLDER_OR_FACTORY", help=_MODEL_HELP)]


def mesh_sizes(mesh: str | None, world_size: int | None) -> AxisSizes | None:
    """Return the axis sizes that `--mesh` names; None without the option.

    Raises:
        ConfigError: the text is not a list of axes and sizes.
    """
    if mesh is None:
        return None
    sizes = axis_sizes(mesh)
    if world_size not in (None, sizes.num_ranks):
        raise typer.BadParameter(
            f"{mesh} has {sizes.num_ranks} ranks, but --world-size is {world_size}. Leave out --world-size.",
            param_hint="--mesh",
        )
    return sizes


def auto_values(pairs: list[str]) -> dict[str, Any]:
    """Parse KEY=VALUE pairs. A VALUE that is not JSON is taken as a string, so that dtypes need no quotes."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, _, text = pair.partition("=")
        if not key or not text:
            raise typer.BadParameter(f"{pair!r} is not KEY=VALUE.", param_hint="--auto")
        if key in ("cfg", "world_size"):  # arguments of policy_from_config, not of its **auto
            raise typer.BadParameter(
                f"{key!r} is not a key of the config. Pass the number of ranks with --world-size.", param_hint="--auto"
            )
        if key in values:
            raise typer.BadParameter(f"{key!r} has two values.", param_hint="--auto")
        try:
            values[key] = json.loads(text)
        except json.JSONDecodeError:
            values[key] = text
    return values


@contextmanager
def messages_to_stderr(verbosity: int) -> Iterator[None]:
    """Log to stderr inside the context. Print a `ZeroAmpError` there without a traceback, and exit with code 1."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)])
    try:
        yield
    except ZeroAmpError as error:
        logger.debug("the error's traceback", exc_info=True)
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)

"""Arguments and options that the commands share, and how they log and print errors to stderr."""

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from zeroamp.policies.errors import ConfigError, ZeroAmpError
from zeroamp.policies.policy import Policy, policy_from_config

logger = logging.getLogger("zeroamp")

ConfigPath = Annotated[Path, typer.Argument(help="The config, a JSON file.", show_default=False)]
WorldSize = Annotated[
    int | None,
    typer.Option(
        "--world-size", metavar="N", min=1, help="Ranks of the run, for keys that depend on them and for bytes."
    ),
]
MESH_HELP = "Axes of the mesh, such as dp_replicate=2,dp=8,tp=4,cp=2. They replace --world-size."
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
_MODEL = typer.Option(
    "--model",
    metavar="FOLDER_OR_FACTORY",
    show_default=False,
    help="A folder with a transformers config.json, or package.module:factory, or path/to/file.py:factory. A factory "
    "is imported and called: it runs that code.",
)
Model = Annotated[str, _MODEL]
OptionalModel = Annotated[str | None, _MODEL]


def read_config(path: Path, auto: Sequence[str] | None, num_ranks: int | None) -> Policy:
    """Return the policy of a config. `auto` are KEY=VALUE pairs; a VALUE that is not JSON is a string, as a dtype is.

    Raises:
        ConfigError: the config has a mistake. The text begins with the path.
    """
    values: dict[str, Any] = {}
    for pair in auto or ():
        key, _, text = pair.partition("=")
        if not key or not text or key in values or key in ("cfg", "world_size"):
            raise typer.BadParameter(
                f"{pair!r} is not KEY=VALUE with a key of the config, each key once.", param_hint="--auto"
            )
        try:
            values[key] = json.loads(text)
        except json.JSONDecodeError:
            values[key] = text
    try:
        return policy_from_config(path, world_size=num_ranks, **values)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if str(path) in text else f"{path}: {text}") from error


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

"""What a command says beside its output: on stderr, as loud as asked."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from zeroamp.policies import ZeroAmpError

logger = logging.getLogger("zeroamp")

Verbosity = Annotated[
    int,
    typer.Option(
        "--verbose", "-v", count=True, show_default=False, help="Log more to stderr; twice: an error's traceback too."
    ),
]


@contextmanager
def messages_to_stderr(verbosity: int) -> Iterator[None]:
    """Log to stderr inside, and print a mistake of the user there, whole and without a traceback; exit code 1."""
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

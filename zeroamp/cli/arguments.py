"""The arguments that several commands share, and what their texts stand for."""

import json
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_command(commands: Any, run: Callable[..., Any]) -> ArgumentParser:
    """Add the command that has a function's name and docstring."""
    text = run.__doc__ or ""
    description = "\n".join(line.strip() for line in text.splitlines()).strip()
    parser: ArgumentParser = commands.add_parser(
        run.__name__,
        help=text.splitlines()[0],
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=run, html=None)
    return parser


def add_config(parser: ArgumentParser, nargs: str | None = None) -> None:
    """Add the config, and the values of its keys that are "auto"."""
    parser.add_argument("config", type=Path, nargs=nargs, help="The config, a JSON file.")
    help = 'Value of a key that is "auto"; repeatable.'
    parser.add_argument("--auto", metavar="KEY=VALUE", type=key_value, action="append", default=[], help=help)


def add_model(parser: ArgumentParser, *, required: bool = True) -> None:
    """Add the model, its units and its inputs."""
    parser.add_argument(
        "--model",
        metavar="FOLDER_OR_FACTORY",
        required=required,
        help="A folder with a transformers config.json, or package.module:factory, or path/to/file.py:factory. A "
        "factory is imported and called: it runs that code.",
    )
    parser.add_argument("--auto-wrap", metavar="CLASS", action="append", help="Class of the units; repeatable.")
    help = "module:function or file.py:function of (batch, seq) that returns the forward's arguments."
    parser.add_argument("--inputs", metavar="FUNCTION", help=help)


def add_ranks(parser: ArgumentParser, *, required: bool = True) -> None:
    """Add the number of ranks."""
    parser.add_argument("--world-size", metavar="N", type=positive, required=required, help="Ranks of the run.")


def add_formats(parser: ArgumentParser, json_help: str) -> None:
    """Add the formats of the output."""
    parser.add_argument("--json", action="store_true", help=json_help)
    add_html(parser)


def add_html(parser: ArgumentParser) -> None:
    """Add the file of a page."""
    help = "Also write a self-contained page (5 MB); needs plotly."
    parser.add_argument("--html", metavar="FILE.html", type=Path, help=help)


def positive(text: str) -> int:
    """Return an integer of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not an integer of 1 or more.")
    return int(text)


def file(text: str) -> Path:
    """Return the path of a file that exists."""
    if not Path(text).is_file():
        raise ArgumentTypeError(f"{text} is not a file.")
    return Path(text)


def key_value(text: str) -> tuple[str, Any]:
    """Return the key and the value of KEY=VALUE. A VALUE that is not JSON is a string, as a dtype is."""
    key, _, value = text.partition("=")
    if not key or not value:
        raise ArgumentTypeError(f"{text!r} is not KEY=VALUE with a key of the config.")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def gpu(text: str) -> str | float:
    """Return the name of a GPU, or its memory in GB."""
    try:
        return float(text)
    except ValueError:
        return text

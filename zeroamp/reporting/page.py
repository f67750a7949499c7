"""Self-contained HTML pages of a ledger, a plan, runs and so on: style, scripts, data and plotly in one file.

A page loads nothing, and its Content-Security-Policy forbids it to load anything. So it opens without a network.
"""

import html
import importlib
import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from zeroamp.policies.errors import ConfigError
from zeroamp.version import __version__

PageKind = Literal["ledger", "plan", "runs", "compare", "sensitivity"]

_SOURCES = files("zeroamp.reporting").joinpath("pages")
_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:; connect-src 'none'">
<meta name="generator" content="zeroamp {version}">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{title}</h1><p>{subtitle}</p></header>
<main id="page"></main>
<footer>{configs}<p>{about}</p></footer>
<script type="application/json" id="data">{data}</script>
<script>{plotly}</script>
<script>
{common}
{script}</script>
</body>
</html>
"""


def write_page(
    path: Path | None, kind: PageKind, title: str, subtitle: str, data: Mapping[str, Any], configs: Mapping[str, Any]
) -> None:
    """Write a page that shows `data`, which `pages/<kind>.js` draws, and ends with the configs. Nothing without a path.

    The path was checked by `check_page`. Raises ConfigError without plotly.
    """
    if path is not None:
        path.write_text(_html(kind, title, subtitle, data, configs), encoding="utf-8")
        sys.stderr.write(f"wrote {path}\n")


def _html(kind: PageKind, title: str, subtitle: str, data: Mapping[str, Any], configs: Mapping[str, Any]) -> str:
    """Return the text of a page. All texts are plain: the page shows them as text, never as markup."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return _TEMPLATE.format(
        about=f"Written on {now} by zeroamp {__version__}, with torch {metadata.version('torch')}.",
        configs="".join(
            f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(json.dumps(config, indent=2))}</pre>"
            "</details>"
            for name, config in configs.items()
        ),
        version=__version__,
        title=html.escape(title),
        subtitle=html.escape(subtitle),
        style=_source("page.css"),
        data=text.replace("<", "\\u003c"),  # so that no text can close the script element
        plotly=_plotly_script(),
        common=_source("common.js"),
        script=_source(f"{kind}.js"),
    )


def check_page(path: Path | None) -> None:
    """Check that the file of a page, if one is asked for, can be written, before computing what it shows.

    Raises:
        ConfigError: plotly is not installed, the path is a folder, or the file cannot be written.
    """
    if path is not None:
        _plotly_script()
        check_file(path, "--html")


def check_file(path: Path, option: str) -> None:
    """Check that a file can be written, and make its folder. Raise ConfigError, which names the option, if not."""
    if path.is_dir():
        raise ConfigError(f"{option}: '{path}' is a folder. Name a file.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists() and not path.is_symlink()
        path.touch()
        if is_new:
            path.unlink()  # a command that fails leaves no file
    except OSError as error:
        raise ConfigError(f"{option}: '{path}' cannot be written ({error.strerror}). Name another file.") from error


def _plotly_script() -> str:
    try:
        script: str = importlib.import_module("plotly.offline").get_plotlyjs()
    except ModuleNotFoundError as error:
        raise ConfigError(f"--html needs the module {error.name!r}: pip install 'zeroamp[html]'.") from error
    return script


def _source(name: str) -> str:
    return _SOURCES.joinpath(name).read_text(encoding="utf-8")

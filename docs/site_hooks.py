"""Hooks of mkdocs."""

import importlib.util
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

HERE = Path(__file__).parent
_CODE_IN_TABLE = re.compile(r"(?<=<td><code>)[\w.]+(?=</code>)")


def on_config(config: Any) -> Any:
    """Leave out pages of the navigation that are not written yet."""
    config.nav = [_existing(entry) for entry in config.nav]
    return config


def _existing(entry: dict[str, Any]) -> dict[str, Any]:
    ((title, value),) = entry.items()
    if isinstance(value, str):
        return entry
    return {title: [each for each in value if (HERE / next(iter(each.values()))).is_file()]}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Add what is too long for a page of the repository: the public names with their docstrings, and all messages."""
    if page.file.src_path == "api.md":
        return f"{markdown}\n{_module('generate').api_sections()}"
    if page.file.src_path == "messages.md":
        return f"{markdown}\n{_module('messages').markdown()}"
    return markdown


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", HERE / f"{name}.py")
    if spec is None or spec.loader is None:
        raise PluginError(f"{HERE / name}.py is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Refuse a page that would load something."""
    if loaded := re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=.(https?://[^ >]+)", output):
        raise PluginError(f"{page.file.src_path} loads {loaded[0]}: the site must need no network")
    return output


def on_page_content(html: str, **_: Any) -> str:
    """Let keys in tables break between their words: the theme breaks them at any letter (see tables.css)."""
    return _CODE_IN_TABLE.sub(lambda found: re.sub(r"([._])(?=\w)", r"\1<wbr>", found[0]), html)

"""Collects the texts of zeroamp's errors and warnings from the source. They are too many for a page of the repository.

`site_hooks.py` adds them to `messages.md` when the site is built, so that its search finds a message. What a text gets
at run time is shown as "…".
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {"policies": "zeroamp.policies", "hooks": "zeroamp.hooks", "zeroamp": "zeroamp"}
"""Folders with source, without the links of `zeroamp`, and how their modules are imported."""

HOLE = "…"
WARNINGS = "Warnings"
_PLACEHOLDER = re.compile(r"%(?:\.\d)?[sdrgf]")
_MIN_WORDS = 4  # less says too little of a message to be recognised

Texts = dict[str, dict[str, str]]
"""Name of an error class, or WARNINGS -> text -> module."""


def all_messages() -> Texts:
    """Return every text, sorted."""
    found: Texts = {}
    for path in _sources():
        for name, text in _messages_in(ast.parse(path.read_text(encoding="utf-8"))):
            if len(text.replace(HOLE, " ").split()) >= _MIN_WORDS:
                found.setdefault(name, {})[text] = _module(path)
    return {
        name: dict(sorted(found[name].items())) for name in sorted(found, key=lambda name: (name == WARNINGS, name))
    }


def markdown() -> str:
    """Return the texts as sections of a page."""
    lines = []
    for name, texts in all_messages().items():
        lines += ["", f"### {name}", ""]
        lines += [f"- {_code(text)} ({module})" for text, module in texts.items()]
    return "\n".join(lines) + "\n"


def _sources() -> Iterator[Path]:
    for folder in PACKAGES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield path


def _module(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES[folder], *rest]).removesuffix(".__init__")


def _code(text: str) -> str:
    ticks = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def _messages_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (class or WARNINGS, text) of the errors that a module makes, and of the warnings that it logs."""
    reader = _Reader(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ERRORS:
            yield from ((name, text) for text in reader.texts(node.args[0]))
        elif name in ("warning", "error") and ast.unparse(node.func) == f"logger.{name}":
            yield from ((WARNINGS, _PLACEHOLDER.sub(HOLE, text)) for text in reader.texts(node.args[0]))


ERRORS = ("CheckpointError", "ConfigError", "PeerError", "PrecisionError", "StepError", "UnsupportedError", "WrapError")


class _Reader:
    """Reads texts in the expressions of one module."""

    def __init__(self, tree: ast.Module) -> None:
        self._constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant | ast.JoinedStr)
        }
        self._functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}

    def texts(self, node: ast.expr) -> list[str]:
        """Return the texts of an error's argument: of both branches, and of a function that returns it."""
        if isinstance(node, ast.IfExp):
            return [*self.texts(node.body), *self.texts(node.orelse)]
        if isinstance(node, ast.Call) and (function := self._functions.get(ast.unparse(node.func).rpartition(".")[2])):
            returned = [each.value for each in ast.walk(function) if isinstance(each, ast.Return) and each.value]
            return [self._text(each) for each in returned]
        return [self._text(node)]

    def _text(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=str(text)):
                return re.sub(r"\s+", " ", text)
            case ast.JoinedStr(values=parts):
                return re.sub(rf"{HOLE}(?:\s*{HOLE})+", HOLE, "".join(map(self._text, parts)))
            case ast.FormattedValue(value=value):
                return self._text(value)
            case ast.Name(id=name) if name in self._constants:
                return self._text(self._constants[name])
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return f"{self._text(left)}{self._text(right)}"
            case ast.Call(func=ast.Name(id="describe"), args=[where, found, valid, remedy]):
                where, found, valid, remedy = map(self._text, (where, found, valid, remedy))
                return f"{where} must be {valid}, but is {found}. {remedy}"
        return HOLE


if __name__ == "__main__":
    sys.stdout.write(markdown())

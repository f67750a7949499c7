"""The one exception tree. A user's mistake is one of these; an internal slip is an AssertionError."""

import json
from collections.abc import Sequence


class ZeroAmpError(Exception):
    """Base of everything zeroamp raises on purpose. The text says where, what was found, what is valid, what to do."""

    def __str__(self) -> str:
        """Return the text without control characters: it may contain a name from an untrusted file."""
        return printable(super().__str__())


class ConfigError(ZeroAmpError, ValueError):
    """A config key is unknown, has an impossible value, or contradicts another key. The text names the key."""


class WrapError(ZeroAmpError, ValueError):
    """A model, mesh or wrap policy cannot be wrapped as asked. The text names the module or parameter."""


class StepError(ZeroAmpError, RuntimeError):
    """The training step was driven in an order or in a way that would train wrongly."""


class PeerError(StepError):
    """Another rank failed. The text names that rank and its error, or the collective in which this rank waited for it.

    With `zeroamp.recovery`, all ranks discarded the optimizer step and may go on.
    """


class PrecisionError(ZeroAmpError, RuntimeError):
    """A module met another precision than the config promised it."""


class CheckpointError(ZeroAmpError, RuntimeError):
    """A checkpoint cannot be written, or does not fit what it is loaded into. The text names the file or parameter."""


def printable(text: str) -> str:
    """Return `text` with all but printable characters and line breaks escaped, so that it cannot steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def error_text(error: BaseException) -> str:
    """Return an error's class and text, or the text alone if the error is one of zeroamp's."""
    return str(error) if isinstance(error, ZeroAmpError) else f"{type(error).__name__}: {error}"


def describe(where: str, found: object, valid: str, remedy: str) -> str:
    """Return an error's text: the place, what is valid there, what was found, and what to do.

    The four arguments are a checklist for the author. The text reads "{where} must be {valid}, but is {found}.
    {remedy}". An error that this sentence does not fit is written out, with the same four things in it.
    """
    return f"{where} must be {valid}, but is {found}. {remedy}"


def some_of(names: Sequence[str], limit: int = 8) -> str:
    """Return the first `limit` names, joined by commas, and how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def shown(value: object) -> str:
    """Return a value of a config as JSON writes it, shortened; a string that looks like another value is called one."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        return f"the {type(value).__name__} {value!r}"
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return f"the string {text}" if is_quoted(value) else text


def is_quoted(value: object) -> bool:
    """Return whether `value` is a string of what JSON reads as a number, true, false or null."""
    try:
        return isinstance(value, str) and not isinstance(json.loads(value), str | list | dict)
    except ValueError:
        return False

"""The exceptions that zeroamp raises for a user's mistake or a fault. An internal error is an AssertionError."""

import difflib
import json
import logging
import re
from collections.abc import Iterable, Sequence


class ZeroAmpError(Exception):
    """Base class of zeroamp's errors. The text names the place, what was found, what is valid and what to do."""

    def __str__(self) -> str:
        """Return the text with control characters escaped: it may contain a name from an untrusted file."""
        return printable(super().__str__())


class ConfigError(ZeroAmpError, ValueError):
    """A config key is unknown, has an impossible value, or contradicts another key. The text names the key.

    Change the config. `zeroamp check config.json` shows what each key does.
    """


class WrapError(ZeroAmpError, ValueError):
    """A model, mesh or wrap policy is not supported. The text names the module or parameter.

    Change what the text names before `wrap_model`, or how the loop calls the model.
    """


class StepError(ZeroAmpError, RuntimeError):
    """The methods of a training step were called in an order, or in a state, that would train wrongly.

    Change the loop. After a step that failed, load a checkpoint.
    """


class PeerError(StepError):
    """Another rank has ended, or did not issue the collective in which this rank waited. The text names it.

    Read the log of the rank that failed first: its error is the cause.
    """


class PrecisionError(ZeroAmpError, RuntimeError):
    """A module would run, or has run, in another precision than the config sets.

    Call the module inside of the model's forward, or name it in `zeroamp.overrides`.
    """


class CheckpointError(ZeroAmpError, RuntimeError):
    """A checkpoint cannot be written, or does not fit what it is loaded into. The text names the file or parameter.

    Build the model and the optimizer as they were at the save. Load an earlier checkpoint if a file is damaged.
    """


def printable(text: str) -> str:
    """Return `text` with all but printable characters and line breaks escaped, so that it cannot steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _escape(record: logging.LogRecord) -> bool:
    """Escape the control characters of a log message, as those of an error: it may contain names from a model."""
    if not (text := record.getMessage()).isprintable():
        record.msg, record.args = printable(text), ()
    return True


logging.getLogger("zeroamp").addFilter(_escape)


def error_text(error: BaseException) -> str:
    """Return an error's class and text, or the text alone if the error is one of zeroamp's."""
    return str(error) if isinstance(error, ZeroAmpError) else f"{type(error).__name__}: {error}"


def describe(where: str, found: object, valid: str, remedy: str) -> str:
    """Return the text of an error: "{where} must be {valid}, but is {found}. {remedy}".

    The four arguments are a checklist for the author. Errors that do not fit this sentence are written out, and contain
    the same four things.
    """
    return f"{where} must be {valid}, but is {found}. {remedy}"


def some_of(names: Sequence[str], limit: int = 8) -> str:
    """Return the first `limit` names, joined by commas, and how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean '…'?" with the most similar known name, ignoring case; "" if none is similar."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"Did you mean {by_lower[near[0]]!r}?" if near else ""


def shown(value: object) -> str:
    """Return a value of a config as JSON, shortened. A string that quotes another JSON value reads `the string "1"`."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        return f"the {type(value).__name__} {value!r}"
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return f"the string {text}" if is_quoted(value) else text


def repr_on_all_ranks(value: object) -> str:
    """Return the `repr` without what differs between processes: addresses, and the order of a set."""
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(repr_on_all_ranks, value)))}}}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def is_quoted(value: object) -> bool:
    """Return whether `value` is a string that contains a JSON number, true, false or null."""
    try:
        return isinstance(value, str) and not isinstance(json.loads(value), str | list | dict)
    except ValueError:
        return False

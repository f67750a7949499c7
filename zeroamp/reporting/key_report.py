"""Lists the keys of a policy with their status and note: `Policy.report`."""

import json
import textwrap
from typing import TYPE_CHECKING, Any

from zeroamp.policies.derived import unread
from zeroamp.policies.schema.config import Config
from zeroamp.policies.schema.keys import Honoured, Key, Native, Unsupported, iter_keys
from zeroamp.reporting.tables import terminal_width

if TYPE_CHECKING:
    from zeroamp.policies.policy import Policy

_TITLES = {
    "honoured": "Honoured",
    "native": "Accepted, changes nothing",
    "off": "Off",
    "no effect": "Without effect here",
    "default": "Not in the config, with their defaults",
}
"""Status -> the line above its keys, in the order of the report."""


def report_rows(policy: "Policy") -> list[dict[str, str]]:
    """Return a dict of key, value, status and note for each key that was given or whose default has an effect.

    The status is "honoured", "native" (accepted, without effect; the note is the reason), "off" (an unsupported key
    whose value disables it), "no effect" (a key of a mode or stage that is not on) or "default".
    """
    given, effective = dict(policy.given), policy.effective_values()
    rows = []
    for key in iter_keys(Config):
        mine = {path: value for path, value in given.items() if path == key.path or path.startswith(f"{key.path}.")}
        for path, value in mine.items():
            status, note = _status(path, value, key, policy)
            rows.append({"key": path, "value": json.dumps(value, default=str), "status": status, "note": note})
        if not mine and isinstance(key.key_class, Honoured) and effective.get(key.path) is not None:
            value = json.dumps(effective[key.path])
            rows.append({"key": key.path, "value": value, "status": "default", "note": key.key_class.note})
    rows += [
        {"key": path, "value": json.dumps(value), "status": "default", "note": "an empty block"}
        for path, value in given.items()
        if path not in {row["key"] for row in rows}
    ]
    return sorted(rows, key=lambda row: list(_TITLES).index(row["status"]))


def _status(path: str, value: Any, key: Key, policy: "Policy") -> tuple[str, str]:
    key_class = key.key_class
    if isinstance(key_class, Native):
        return "native", key_class.note
    if isinstance(key_class, Unsupported):
        is_key = path == key.path
        return "off", "this value disables the key; any other value is an error" if is_key else "its block is off"
    if reason := _idle(path, policy):
        return "no effect", reason
    note = key_class.note
    if path == "train_batch_size" and value and (micro := policy.train_micro_batch_size_per_gpu) is not None:
        num_ranks = value // (micro * policy.gradient_accumulation_steps)
        note += f". The sizes imply {num_ranks} rank{'' if num_ranks == 1 else 's'}"
    return "default" if value is None else "honoured", note


def _idle(path: str, policy: "Policy") -> str | None:
    """Return why an honoured key has no effect in this policy, or None if it has an effect."""
    if reason := unread(path, policy.config):
        return reason
    name = path.rpartition(".")[2]
    if name in ("stage3_max_live_parameters", "stage3_prefetch_bucket_size", "own_units") and policy.stage != 3:
        return f"stage is {policy.stage}"
    if name == "external_autocast" and policy.mode == "autocast":
        return "with torch_autocast, the config's autocast replaces any other"
    if name == "keep_in_fp32_modules" and policy.mode == "fp32":
        return "everything is in fp32"
    if name == "pin_memory" and not policy.offload.to_cpu:
        return "no parameters are offloaded"
    if name == "grad_accum_dtype" and policy.gradient_accumulation_steps == 1:
        return "gradient_accumulation_steps is 1; a pipeline's schedule sums in this dtype"
    return None


def render_report(policy: "Policy", *, defaults: bool) -> str:
    """Return the keys by status as text that fits the terminal: each with its value, and its note in the next line."""
    rows, parts = report_rows(policy), []
    for status, title in _TITLES.items():
        own = [row for row in rows if row["status"] == status]
        count = f"{len(own)} key{'' if len(own) == 1 else 's'}"
        if own and (status != "default" or defaults):
            parts.append("\n".join([f"{title}: {count}", *map(_entry, own)]))
        elif own:
            parts.append(f"{count} not in the config {'has its' if len(own) == 1 else 'have their'} default.")
    return "\n\n".join(parts)


def _entry(row: dict[str, str]) -> str:
    lines = (f"{row['key']} = {row['value']}", "  ", "    "), (row["note"], " " * 6, " " * 6)
    return "\n".join(
        textwrap.fill(text, terminal_width(), initial_indent=first, subsequent_indent=others)
        for text, first, others in lines
    )

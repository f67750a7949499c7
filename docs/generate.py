"""Writes the tables of `config.md`, `migrating-from-deepspeed.md` and `accumulation.md` from the code.

Run it after a change of the schema: python docs/generate.py
"""

import json
import sys
from pathlib import Path

from pydantic_core import PydanticUndefined
from tabulate import tabulate

from zeroamp.policies.accumulation import ACCUMULATE, COMPUTE, STAGES, refusal
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.schema import (
    OPTIMIZER_PARAMS,
    SAME,
    SCHEDULER_PARAMS,
    Config,
    Honoured,
    Key,
    Native,
    Unsupported,
    iter_keys,
)

HERE = Path(__file__).parent
BEGIN, END = "<!-- generated: {name} -->\n", "<!-- end: {name} -->\n"


def tables() -> dict[str, str]:
    """Return the generated tables by name."""
    keys = list(iter_keys(Config))
    return {
        "honoured": _table([_honoured_row(key) for key in keys if isinstance(key.key_class, Honoured)]),
        "native": _table([_row(key, "why") for key in keys if isinstance(key.key_class, Native)]),
        "unsupported": _table([_unsupported_row(key) for key in keys if isinstance(key.key_class, Unsupported)]),
        "defaults": _table([_defaults_row(key) for key in keys if _differs(key)]),
        "optimizers": _table([_params_row(name, block) for name, block in OPTIMIZER_PARAMS.items()]),
        "accumulation": _accumulation(),
        "schedulers": _table([_params_row(name, block) for name, block in SCHEDULER_PARAMS.items()]),
    }


def _row(key: Key, heading: str) -> dict[str, str]:
    return {"key": f"`{key.path}`", heading: key.key_class.note}


def _honoured_row(key: Key) -> dict[str, str]:
    return {"key": f"`{key.path}`", "default": _json(key.default), "meaning": key.key_class.note}


def _unsupported_row(key: Key) -> dict[str, str]:
    if not isinstance(key.key_class, Unsupported):
        raise AssertionError(f"expected an unsupported key, got {key.key_class}")
    off = ", ".join(_json(value) for value in key.key_class.off if value is not None)
    return {"key": f"`{key.path}`", "accepted": off or "-", "instead": key.key_class.note}


def _differs(key: Key) -> bool:
    return isinstance(key.key_class, Honoured) and key.key_class.deepspeed_default is not SAME


def _defaults_row(key: Key) -> dict[str, str]:
    if not isinstance(key.key_class, Honoured):
        raise AssertionError(f"expected an honoured key, got {key.key_class}")
    theirs = key.key_class.deepspeed_default
    return {
        "key": f"`{key.path}`",
        "zeroamp": _json(key.default),
        "DeepSpeed 0.19.8": theirs if isinstance(theirs, str) else _json(theirs),
        "meaning": key.key_class.note,
    }


def _params_row(name: str, block: type) -> dict[str, str]:
    keys = [key for key in iter_keys(block) if not isinstance(key.key_class, Unsupported)]
    return {"type": f"`{name}`", "params and defaults": ", ".join(f"`{key.path}` {_json(key.default)}" for key in keys)}


def _accumulation() -> str:
    rows = []
    for mode, low_dtype in COMPUTE:
        compute = f"autocast {short_name(low_dtype)}" if mode == "autocast" and low_dtype else mode
        for accumulate in ACCUMULATE:
            row, dtype = {"compute": compute, "accumulate": short_name(accumulate)}, short_name(accumulate)
            for stage in STAGES:
                how = (
                    f"sharded {dtype}, reduced every micro-batch" if stage >= 2 else f"unsharded {dtype}, reduced once"
                )
                reason = refusal(low_dtype, accumulate)
                row[f"stage {stage}"] = f"refused: {reason}" if reason else how
            rows.append(row)
    return _table(rows)


def _json(value: object) -> str:
    if value is PydanticUndefined:
        return "(required)"
    return "-" if value is None else f"`{json.dumps(value)}`"


def _table(rows: list[dict[str, str]]) -> str:
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True) + "\n"


def render(text: str) -> str:
    """Return `text` with every generated table replaced by the schema's."""
    for name, table in tables().items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        if begin in text:
            head, _, rest = text.partition(begin)
            text = f"{head}{begin}{table}{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    for path in (HERE / name for name in ("config.md", "migrating-from-deepspeed.md", "accumulation.md")):
        path.write_text(render(path.read_text()))
        sys.stdout.write(f"wrote {path.name}\n")

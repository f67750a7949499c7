"""Writes the tables of the docs that the code decides: python docs/generate.py

`config.md` and `accumulation.md` from the schema, those of `precision.md` from planning, the names of
`deepspeed-api.md`, and the errors of `messages.md`. What only the site shows, `site_hooks.py` takes from here when it
is built: the names of `api.md`, whose docstrings mkdocstrings reads.
"""

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import product
from pathlib import Path

import torch
from pydantic_core import PydanticUndefined
from torch import nn

import zeroamp
from zeroamp import deepspeed
from zeroamp.deepspeed.accelerator import Accelerator
from zeroamp.deepspeed.engine import READERS, DeepSpeedEngine
from zeroamp.deepspeed.optimizer import ZeroOptimizer
from zeroamp.deepspeed.refused import REFUSED
from zeroamp.optimizers.optimizer_params import OPTIMIZER_PARAMS
from zeroamp.optimizers.scheduler_params import SCHEDULER_PARAMS
from zeroamp.planning.group_dtypes import group_dtypes, param_dtypes
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.precisions import Precision
from zeroamp.policies.accumulation import ACCUMULATE, COMPUTE
from zeroamp.policies.conflicts import refusal
from zeroamp.policies.derived import Mode
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.policy import Policy, policy_from_config
from zeroamp.policies.schema.config import Config
from zeroamp.policies.schema.keys import SAME, Honoured, Key, Native, Unsupported, iter_keys

HERE = Path(__file__).parent
_PAGE = re.compile(r"\bdocs/([\w-]+)\.md\b")
BEGIN, END = "<!-- generated: {name} -->\n", "<!-- end: {name} -->\n"


def tables() -> dict[str, str]:
    """Return the generated tables by name."""
    keys = list(iter_keys(Config))
    return {
        "honoured": _table([_honoured_row(key) for key in keys if isinstance(key.key_class, Honoured)]),
        "native": _grouped("keys", [_row(key, "why") for key in keys if isinstance(key.key_class, Native)]),
        "unsupported": _grouped(
            "keys", [_row(key, "instead") for key in keys if isinstance(key.key_class, Unsupported)]
        ),
        "optimizers": _table([_params_row(name, block) for name, block in OPTIMIZER_PARAMS.items()]),
        "accumulation": _accumulation(),
        "schedulers": _table([_params_row(name, block) for name, block in SCHEDULER_PARAMS.items()]),
    }


def precision_tables() -> dict[str, str]:
    """Return the tables of `precision.md` by name: the dtypes and collectives that planning decides."""
    return {"dtypes": _table(list(_dtypes_rows())), "reductions": _table(list(_reduction_rows()))}


def message_tables() -> dict[str, str]:
    """Return the table of `messages.md`: the first sentence and the second paragraph of each error's docstring."""
    rows = []
    for name in sorted(name for name in zeroamp.__all__ if name.endswith("Error") and name != "ZeroAmpError"):
        when, do = (" ".join(part.split()) for part in inspect.getdoc(getattr(zeroamp, name)).split("\n\n"))
        rows.append({"error": f"`{name}`", "when": f"{when.partition('. ')[0].rstrip('.')}.", "what to do": do})
    return {"errors": _table(rows)}


def deepspeed_tables() -> dict[str, str]:
    """Return what `deepspeed-api.md` lists: the names that there are, and what is refused."""
    calls = [f"deepspeed.{name}" for name in deepspeed.__all__ if name not in _NOT_CALLS]
    in_modules = [f"{home}.{name}" for home in ("zero", "utils", "comm", "ops.adam") for name in _defined_in(home)]
    engine = [f"engine.{name}" for name in _members(DeepSpeedEngine)]
    optimizer = [f"optimizer.{name}" for name in _members(ZeroOptimizer)]
    refused = [{"names": f"`{name}`", "instead": reason} for name, reason in REFUSED.items()]
    return {
        "deepspeed-functions": _names([*calls, *in_modules]),
        "deepspeed-engine": _names([*engine, *optimizer]),
        "deepspeed-readers": _names([f"engine.{name}" for name in READERS]),
        "deepspeed-accelerator": _names(_members(Accelerator)),
        "deepspeed-refused": _grouped("names", refused),
    }


FIRST = ("wrap_model", "TrainStep")
"""The public names with which `api.md` begins."""

API = {
    "Config": ("policies",),
    "Wrapping": ("discovery", "planning", "wrapping"),
    "The step": ("training", "optimizers", "reproducible", "pipelines"),
    "The ledger": ("ledger", "measured_precision"),
    "Before a run": ("dry_run",),
    "Reports and traces": ("reporting",),
    "Memory between the steps": ("host_memory",),
    "Checkpoints and weights": ("checkpoint", "weights", "deepspeed"),
}
"""Heading of `api.md` -> the packages whose public names are below it. Errors come last."""


def api_sections() -> str:
    """Return the sections that the site adds to `api.md`: the public names, with the modules that define them."""
    homes = {name: _home(name) for name in zeroamp.__all__}
    errors = {name for name in homes if homes[name].startswith("zeroamp.policies.errors.")}
    parts = ["## Wrap and train", *(f"::: {homes.pop(name)}" for name in FIRST)]
    for title, packages in API.items():
        names = [name for name in homes if homes[name].split(".")[1] in packages and name not in errors]
        parts += [f"## {title}", *(f"::: {homes[name]}" for name in sorted(names, key=str.lower))]
    parts += ["## Errors", *(f"::: {homes[name]}" for name in sorted(errors))]
    return "\n\n".join(parts) + "\n"


def _home(name: str) -> str:
    value = getattr(zeroamp, name)
    module = getattr(value, "__module__", "")
    return f"{module if module.startswith('zeroamp.') else zeroamp._HOMES[name]}.{name}"


_NOT_CALLS = {"logger", "ZeroOptimizer", "UnsupportedError", "DeepSpeedEngine", "mark_sharded", "leaf_names"}


def _names(names: Iterable[str]) -> str:
    text = ", ".join(f"`{name}`" for name in names)
    return f"{textwrap.fill(text, 120, break_on_hyphens=False)}.\n"


def _defined_in(name: str) -> Iterator[str]:
    """Yield the public functions and classes of a module of `zeroamp.deepspeed` that it defines itself."""
    module = import_module(f"zeroamp.deepspeed.{name}")
    for each, value in vars(module).items():
        is_own = callable(value) and getattr(value, "__module__", "") == module.__name__
        if is_own and not each.startswith("_") and each not in _NOT_CALLS:
            yield each


def _members(*classes: type) -> Iterator[str]:
    """Yield the public methods and properties of classes, in their order."""
    for each in classes:
        for name, member in vars(each).items():
            if not name.startswith("_") and (callable(member) or isinstance(member, property)):
                yield name


def _dtypes_rows() -> Iterator[dict[str, str]]:
    """Yield the dtypes of an fp32 parameter in each mode at stage 3, over 8 ranks."""
    low = Precision(is_low=True, compute="low", reason="")
    others = Precision(is_low=False, compute="per op", reason="")
    stored = Precision(is_low=False, compute="as stored", reason="")
    kinds = {"autocast": {"safe": low, "all others": others}, "fp32": {"all": stored}}
    every = ((mode, dtype, *kind) for mode, dtype in COMPUTE for kind in kinds.get(mode, {"all": low}).items())
    for mode, dtype, parameters, precision in every:
        policy = _policy(mode, dtype, 3).replace(gradient_accumulation_steps=2)
        dtypes, key = param_dtypes(nn.Parameter(torch.empty(1, device="meta")), policy, precision)
        of_group = group_dtypes(key, policy, Ranks(num_shards=8))
        yield {
            "mode": f"`torch_autocast` {short_name(dtype)}" if mode == "autocast" and dtype else f"`{mode}`",
            "parameters": parameters,
            "stored, optimizer": short_name(dtypes.stored),
            "all-gathered": short_name(dtypes.param),
            "compute": "autocast, per op" if mode == "autocast" else dtypes.compute,
            "raw gradient": short_name(key.param),
            "gradients between ranks": short_name(of_group.communication),
            "summed over ranks": short_name(of_group.reduce),
            "summed over micro-batches": short_name(of_group.sharded_accumulate),
        }


def _policy(mode: Mode, dtype: torch.dtype | None, stage: int) -> Policy:
    block = {"torch_autocast": {"enabled": True, "dtype": short_name(dtype)}} if mode == "autocast" and dtype else {}
    if mode in ("bf16", "fp16"):
        block = {mode: {"enabled": True}}
    return policy_from_config({**block, "zero_optimization": {"stage": stage}})


def _reduction_rows() -> Iterator[dict[str, str]]:
    """Yield how bf16 gradients are reduced at each stage, without and with replicas."""
    for how, stage, replicas in product(("fp32", "native"), (0, 1), (None, 2)):
        if stage == 0 and replicas is None:
            continue  # stage 0 always replicates
        policy = _policy("autocast", torch.bfloat16, stage).replace(reduce_accumulate_dtype=how)
        safe = Precision(is_low=True, compute="low", reason="")
        _, key = param_dtypes(nn.Parameter(torch.empty(1, device="meta")), policy, safe)
        dtypes = group_dtypes(key, policy, Ranks(num_shards=8, num_replicas=replicas))
        yield {
            "`reduce_accumulate_dtype`": how,
            "stage": "0" if stage == 0 else "1 to 3",
            "mesh": "replicas" if stage == 0 else ("shards" if replicas is None else "replicas x shards"),
            "over shards": f"{dtypes.reduction} of {short_name(dtypes.communication)}" if dtypes.reduction else "-",
            "result": short_name(dtypes.reduce),
            "over replicas": f"all_reduce of {short_name(dtypes.replica)}" if dtypes.replica else "-",
        }


def _note(key: Key) -> str:
    if isinstance(key.key_class, Unsupported):
        values = [_json(value) for value in key.key_class.off if value not in (None, False)]
        return f"{key.key_class.note} {' or '.join(values)} is accepted." if values else key.key_class.note
    other = key.key_class.other_name
    return key.key_class.note + (f". Also named `{other}`" if other else "")


def _row(key: Key, heading: str) -> dict[str, str]:
    return {"keys": f"`{key.path}`", heading: _note(key)}


def _honoured_row(key: Key) -> dict[str, str]:
    if not isinstance(key.key_class, Honoured):
        raise AssertionError(f"expected an honoured key, got {key.key_class}")
    default, theirs = _json(key.default), key.key_class.deepspeed_default
    if theirs is not SAME:
        default += f" (DeepSpeed: {theirs if isinstance(theirs, str) else _json(theirs)})"
    return {"key": f"`{key.path}`", "default": default, "meaning": _note(key)}


def _params_row(name: str, block: type) -> dict[str, str]:
    keys = [key for key in iter_keys(block) if not isinstance(key.key_class, Unsupported)]
    return {"type": f"`{name}`", "params and defaults": ", ".join(f"`{key.path}` {_json(key.default)}" for key in keys)}


def _accumulation() -> str:
    rows = []
    for mode, low_dtype in COMPUTE:
        compute = f"autocast {short_name(low_dtype)}" if mode == "autocast" and low_dtype else mode
        allowed = {short_name(each): refusal(low_dtype, each) is None for each in ACCUMULATE}
        rows.append({"compute": compute} | {name: "yes" if is_on else "refused" for name, is_on in allowed.items()})
    return _table(rows)


def _json(value: object) -> str:
    if value is PydanticUndefined:
        return "(required)"
    return "-" if value is None else f"`{json.dumps(value)}`"


def _table(rows: list[dict[str, str]]) -> str:
    """Return a table in Markdown, without padding: a long cell would lengthen every row."""
    head, *lines = (f"| {' | '.join(row)} |\n" for row in ([*rows[0]], *(row.values() for row in rows)))
    return _PAGE.sub(_link, "".join([head, f"|{'---|' * len(rows[0])}\n", *lines]))


def _link(named: re.Match[str]) -> str:
    """Return a link to a page that a text of the code names, with the first words of its heading."""
    heading = (HERE / f"{named[1]}.md").read_text().partition("\n")[0].removeprefix("# ")
    return f"[{heading.partition(':')[0]}]({named[1]}.md)"


def _grouped(column: str, rows: list[dict[str, str]]) -> str:
    """Return a table in which rows that differ only in `column` are one, with all of its values."""
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        rest = tuple(value for name, value in row.items() if name != column)
        groups[rest] = {**row, column: f"{groups[rest][column]}, {row[column]}"} if rest in groups else row
    return _table(list(groups.values()))


def render(text: str) -> str:
    """Return `text` with every generated table replaced by that of the code."""
    for name, table in (tables() | precision_tables() | message_tables() | deepspeed_tables()).items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        if begin in text:
            head, _, rest = text.partition(begin)
            text = f"{head}{begin}{table}{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    for name in ("config.md", "accumulation.md", "precision.md", "messages.md", "deepspeed-api.md"):
        path = HERE / name
        path.write_text(render(path.read_text()))
        sys.stdout.write(f"wrote {path.name}\n")

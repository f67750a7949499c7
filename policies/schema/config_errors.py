"""Writes the error of a config that does not fit the schema: one line per bad key, which names the key.

Loaded only for such a config.
"""

import difflib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from zeroamp.policies.errors import describe, is_quoted, nearest, shown
from zeroamp.policies.schema.config import Config, OptimizerBlock, SchedulerBlock
from zeroamp.policies.schema.keys import REMOVE_IT, Block, Unsupported, inner_block, iter_keys, own_class

_VALID = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "tuple_type": "a list",
    "model_type": "an object of keys",
    "too_long": "a list of at most {max_length}",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "value_error": "{error}",
}
"""Type of a pydantic error -> what is valid."""
_MEANT = {
    **dict.fromkeys(("clip", "grad_clip", "clip_grad_norm", "max_grad_norm", "max_norm"), "gradient_clipping"),
    **dict.fromkeys(("accumulation_steps", "grad_accumulation_steps", "grad_accum"), "gradient_accumulation_steps"),
    **dict.fromkeys(("micro_batch_size", "per_device_train_batch_size"), "train_micro_batch_size_per_gpu"),
    **dict.fromkeys(("autocast", "mixed_precision"), "torch_autocast"),
    "gradient_accumulation_dtype": "data_types.grad_accum_dtype",
    "zero": "zero_optimization",
    "reduce_dtype": "communication_data_type",
}
"""Name of a key elsewhere -> the path of the key with its meaning, where the spelling is not near."""
_ELSEWHERE = {
    "fsdp": "zeroamp calls FSDP2 itself: set zero_optimization.stage.",
    "activation_checkpointing.enabled": "Call model.gradient_checkpointing_enable() before wrap_model.",
}
"""Path of a key that neither has -> what to do, beside removing it."""
_SET_BY_MODE = ("dtype", "param_dtype", "compute_dtype")  # FSDP2's names among them
_TYPE_ERRORS = ("_type", "_from_float", "value_error")
_MOST_LINES = 20  # of an error: finding the key that was meant takes a millisecond for each unknown one
_MANY = 12  # the most keys that an error lists; for a longer block it names a command


def explain(error: ValidationError, cfg: Mapping[str, Any]) -> str:
    """Return a line for each of the first 20 keys with an error, and how many more there are."""
    details: dict[str, list[Any]] = {}
    for detail in error.errors():
        path = _path(detail["loc"], cfg, is_missing=detail["type"] == "missing")
        details.setdefault(path, []).append(detail)
    # pydantic also reports an error of a list's item for the list, by other members of a union: only the item's counts.
    outer = {path[:end] for path in details for end, character in enumerate(path) if character == "."}
    wrong = [path for path in details if path not in outer]
    lines = [_explain(path, details[path]) for path in wrong[:_MOST_LINES]]
    more = len(wrong) - _MOST_LINES
    return "\n".join([*lines, f"{more:,} more keys have errors."] if more > 0 else lines)


def _explain(path: str, details: list[Any]) -> str:
    """Return the sentence for one key from pydantic's errors. A key of a union type has one error per member."""
    detail = details[0]
    if detail["type"] == "refused":
        return f"{path} {detail['ctx']['sentence']}"
    if detail["type"] == "missing":
        return f"{path} is missing and has no default. Add it."
    if detail["type"] == "extra_forbidden":
        if path in _ELSEWHERE or path.rpartition(".")[2].startswith("_"):
            instead = _ELSEWHERE.get(path, "JSON has no comments: write them elsewhere.")
            return f"{path} is a key of neither DeepSpeed 0.19.8 nor zeroamp. Remove it. {instead}"
        known, block = _siblings(path), path.rpartition(".")[0] or "the top level"
        listed = ", ".join(known) if len(known) <= _MANY else "listed by `zeroamp check --all`"
        remedy = f"{_nearest(path, known)} The keys of {block} are {listed}."
        return f"{path} is a key of neither DeepSpeed 0.19.8 nor zeroamp. {remedy}"
    value = detail["input"]
    valid = " or ".join(_VALID.get(each["type"], each["msg"]).format(**each.get("ctx", {})) for each in details)
    valid = valid.replace("'", '"')  # pydantic quotes a literal as Python does
    return describe(path, shown(value), valid, _remedy(path, value, details, valid))


def _remedy(path: str, value: object, details: list[Any], valid: str) -> str:
    """Return what to do about the value at `path`. `details` are pydantic's errors, one for each union member.

    `valid`: text of what is valid.
    """
    if is_quoted(value) and ("number" in valid or str(value) in valid):
        return "Remove the quotes."
    if isinstance(value, str | Mapping) and any(each["type"] == "tuple_type" for each in details):
        return "Put it in a list."
    is_switch = isinstance(value, bool) and any(each["type"] == "model_type" for each in details)
    if is_switch and "enabled" in _siblings(f"{path}."):
        dtype = {"dtype": "bfloat16"} if value and path == "torch_autocast" else {}
        return f"Write {json.dumps({'enabled': value, **dtype})}."
    if value == "nvme":
        return 'Write "cpu": host memory is the only place to offload to. Its bytes per rank: `zeroamp plan`.'
    is_type = any(each["type"].endswith(_TYPE_ERRORS) for each in details)
    return "Change the value; JSON types are not converted." if is_type else "Change the value."


def _path(location: tuple[Any, ...], cfg: Any, *, is_missing: bool) -> str:
    """Return a pydantic location as a path in the config: without the names of union members.

    The last parts of a missing key are not in the config either. They are lower-case words, and names of union members
    are not.
    """
    parts: list[str] = []
    for part in location:
        is_key = isinstance(cfg, Mapping) and part in cfg
        if is_key or (isinstance(cfg, list | tuple) and isinstance(part, int) and part < len(cfg)):
            cfg = cfg[part]
        elif parts and not (is_missing and (isinstance(part, int) or (part.isidentifier() and part.islower()))):
            continue
        parts.append(str(part))
    return ".".join(parts)


def _siblings(path: str) -> list[str]:
    """Return the supported keys in the block of `path`, sorted. A block that another package checks has none here."""
    block: type[Block] = Config
    for part in (part for part in path.split(".")[:-1] if not part.isdigit()):  # a number is an index of a list
        inner = inner_block(block.model_fields[part])
        if inner is None:  # optimizer.params
            return []
        block = inner
    return sorted(name for name, field in block.model_fields.items() if not isinstance(own_class(field), Unsupported))


def _nearest(path: str, siblings: list[str]) -> str:
    block, _, name = path.rpartition(".")
    if name in _SET_BY_MODE:
        return "Remove it: torch_autocast, bf16 or fp16, the one that is enabled, sets this dtype."
    if name in _MEANT and _MEANT[name] != path:
        return f"Did you mean {_MEANT[name]!r}?"
    if near := nearest(name, siblings):
        return near
    elsewhere = {key.path.rpartition(".")[2]: key.path for key in iter_keys(Config)}
    types = (SchedulerBlock if block == "scheduler" else OptimizerBlock).types()
    for of_type in types.blocks.values():
        elsewhere |= {key.path: f"{block or 'optimizer'}.params.{key.path}" for key in iter_keys(of_type)}
    names = difflib.get_close_matches(name, elsewhere, n=1)
    return f"Did you mean {elsewhere[names[0]]!r}?" if names else REMOVE_IT

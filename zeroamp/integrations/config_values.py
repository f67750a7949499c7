"""Fills a config from the arguments of a library's trainer, by the rules of transformers for DeepSpeed's configs."""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from zeroamp.policies.auto_values import AUTO
from zeroamp.policies.dtypes import DTYPE_BY_NAME
from zeroamp.policies.errors import ConfigError, shown
from zeroamp.policies.json_values import flatten, load_config
from zeroamp.policies.key_names import rename_keys
from zeroamp.policies.policy import ConfigLike, Policy

ConfigOrPolicy = ConfigLike | Policy
Precision = Literal["no", "bf16", "fp16"]
"""A precision by accelerate's names."""

PRECISIONS: Mapping[torch.dtype | None, Precision] = {None: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Low dtype of a policy -> the name of that precision."""
_ENABLED, _DTYPE = "torch_autocast.enabled", "torch_autocast.dtype"
_BLOCKS = ("bf16", "fp16")


def flat_config(config: ConfigLike) -> dict[str, Any]:
    """Return {path of a key: value} of a config, with today's names of the keys."""
    return rename_keys(flatten(load_config(config)))


def fill_precision(flat: dict[str, Any], asked: Precision) -> list[str]:
    """Fill the precision mode in `flat`: a config without one gets `torch_autocast` in the dtype that is asked for.

    Returns:
        A line for each key that disagrees.
    """
    dtype = next(dtype for dtype, name in PRECISIONS.items() if name == asked)
    if flat.get(_ENABLED) == AUTO:
        flat[_ENABLED] = dtype is not None
    is_autocast = bool(flat.get(_ENABLED))
    if flat.get(_DTYPE) == AUTO and dtype is None:
        del flat[_DTYPE]
    mismatches = []
    for block in _BLOCKS:
        is_asked, found = block == asked, flat.get(f"{block}.enabled")
        if found == AUTO:
            flat[f"{block}.enabled"] = is_asked and not is_autocast
        elif found is not None and bool(found) != is_asked and not (is_autocast and not found):
            mismatches.append(f"{block}.enabled is {shown(found)}, but the argument {block} is {shown(is_asked)}")
    if dtype is None or mismatches or any(flat.get(f"{block}.enabled") for block in _BLOCKS):
        return mismatches
    if flat.setdefault(_ENABLED, True) is False:
        return [f"{_ENABLED} is false, but the argument {asked} is true"]
    if flat.get(_DTYPE, AUTO) == AUTO:
        flat[_DTYPE] = str(dtype).removeprefix("torch.")
    elif DTYPE_BY_NAME.get(str(flat[_DTYPE]).removeprefix("torch.")) != dtype:
        return [f"{_DTYPE} is {shown(flat[_DTYPE])}, but the argument {asked} is true"]
    return []


def mismatches_of(flat: Mapping[str, Any], known: Mapping[str, tuple[str, Any]]) -> list[str]:
    """Return a line for each key whose value is neither "auto" nor that of its argument.

    `known`: {path of a key: (name of the argument, its value)}.
    """
    return [
        f"{path} is {shown(flat[path])}, but {name} is {shown(value)}"
        for path, (name, value) in known.items()
        if flat.get(path) not in (None, AUTO, value)
    ]


def refuse_mismatches(mismatches: list[str], arguments: str) -> None:
    """Raise ConfigError with all lines, if there are any. `arguments`: what the config disagrees with."""
    if mismatches:
        lines = "".join(f"\n- {line}" for line in mismatches)
        raise ConfigError(
            f"The zeroamp config and {arguments} disagree:{lines}\nCorrect one of the two, or write "
            '"auto" in the config, to use the value of the argument.'
        )

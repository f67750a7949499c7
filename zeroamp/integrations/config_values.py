"""Fills a config from the arguments of a library's trainer, by the rules of transformers for DeepSpeed's configs.

| a key of the config is | then it |
|---|---|
| "auto" | gets the value of its argument, else a rule's (the model's `hidden_size`), else that of `_DEFAULTS` |
| another value | must agree with the argument |
| not there | is left out. Only accumulation, clipping and the precision are taken from the arguments even then |

`zeroamp.sync_module_states` is true unless the config sets it: all ranks get the first rank's weights, as with DDP.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from zeroamp.policies.auto_values import AUTO, DERIVED, open_auto_keys
from zeroamp.policies.dtypes import DTYPE_BY_NAME
from zeroamp.policies.errors import ConfigError, shown, some_of
from zeroamp.policies.json_values import flatten, load_config, nest
from zeroamp.policies.key_names import rename_keys
from zeroamp.policies.policy import ConfigLike, Policy

ConfigOrPolicy = ConfigLike | Policy
Precision = Literal["no", "bf16", "fp16"]
"""A precision by accelerate's names."""
KnownValues = Mapping[str, tuple[str, Any]]
"""{path of a config key: (name of the argument that has its value, the value)}."""

PRECISIONS: Mapping[torch.dtype | None, Precision] = {None: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Low dtype of a policy -> the name of that precision."""
STEPS, CLIPPING = "gradient_accumulation_steps", "gradient_clipping"
_DEFAULTS = {STEPS: 1, CLIPPING: 0.0, "scheduler.params.warmup_min_lr": 0}
"""Values of keys that are "auto", if the library has no argument for them: it may clip in its loop."""
_BATCH_SIZES = ("train_micro_batch_size_per_gpu", "train_batch_size")
_ENABLED, _DTYPE = "torch_autocast.enabled", "torch_autocast.dtype"
_BLOCKS = ("bf16", "fp16")
_SAVES_16_BIT = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


def flat_config(config: ConfigOrPolicy) -> dict[str, Any]:
    """Return {path of a key: value} of a config, or of the config of a policy, with today's names of the keys."""
    if isinstance(config, Policy):
        return dict(config.given)
    return rename_keys(flatten(load_config(config)))


def fill_config(
    config: ConfigOrPolicy,
    known: KnownValues,
    *,
    precision: Precision | None,
    arguments: str,
    model: nn.Module | None = None,
    is_complete: bool = True,
) -> dict[str, Any]:
    """Return a config with its "auto" values filled from a library's arguments: see the table of this module.

    Batch sizes that are "auto" and have no argument are left out: data loaders decide them.

    Args:
        config: the path of a JSON file, a mapping, or a policy. It is not changed.
        known: the arguments.
        precision: the precision of the arguments; None if they do not set it, so that the config decides. A config
            without a precision mode gets `torch_autocast` in this dtype.
        arguments: whose arguments these are, for errors.
        model: its config's `hidden_size` fills sizes.
        is_complete: False leaves keys "auto" that have no value yet.

    Raises:
        ConfigError: keys and arguments disagree (the error names all of them), or an "auto" cannot be filled.
    """
    flat = flat_config(config)
    switches = _ENABLED, *(f"{block}.enabled" for block in _BLOCKS)
    was_auto = AUTO in map(flat.get, switches)
    mismatches = _fill_precision(flat, precision or "no")
    if precision is None:
        mismatches = []
    _refuse_mismatches(mismatches + _mismatches(flat, known), arguments)
    for path in (path for path in (STEPS, CLIPPING) if path in known):
        flat.setdefault(path, known[path][1])
    width, by_width = hidden_size(model), DERIVED["hidden_size"]
    left = []
    for path in open_auto_keys(nest(flat)):
        if path in known:
            flat[path] = known[path][1]
        elif path in _DEFAULTS:
            flat[path] = _DEFAULTS[path]
        elif path in _BATCH_SIZES:
            del flat[path]
        elif path in by_width and width is not None:
            flat[path] = by_width[path](width)
        else:
            left.append(path)
    if left and is_complete:
        raise ConfigError(
            f'{some_of(left)} must have a value, but is "auto": neither {arguments} nor the hidden_size of the '
            "model's config give one. Write a value, or remove the key."
        )
    if was_auto and not any(map(flat.get, switches)):
        flat.pop(_SAVES_16_BIT, None)  # one config for runs in low precision and in fp32, which has no such weights
    filled = nest(flat)
    if isinstance(own := filled.get("zeroamp", {}), dict):  # else the policy's error names the block
        filled["zeroamp"] = {"sync_module_states": True, **own}
    return filled


def refuse_other_precision(policy: Policy, asked: Precision | None, argument: str) -> None:
    """Raise ConfigError if an argument asks for another precision than the policy's. None: it asks for none."""
    found = PRECISIONS[policy.low_dtype]
    if asked not in (None, found):
        raise ConfigError(
            f'{argument} asks for the precision "{asked}", but the config sets "{found}". Leave the argument out, so '
            "that the config decides, or set torch_autocast (enabled, dtype) in the config."
        )


def hidden_size(model: nn.Module | None) -> int | None:
    """Return the width of a transformers model, or of its text part; None if its config does not have it."""
    config = getattr(model, "config", None)
    for each in (config, getattr(config, "text_config", None)):
        if isinstance(size := getattr(each, "hidden_size", None), int):
            return size
        if sizes := getattr(each, "hidden_sizes", None):
            return int(max(sizes))
    return None


def _fill_precision(flat: dict[str, Any], asked: Precision) -> list[str]:
    """Fill the precision mode in `flat`. Return a line for each key that disagrees."""
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


def _mismatches(flat: Mapping[str, Any], known: KnownValues) -> list[str]:
    """Return a line for each key whose value is neither "auto" nor that of its argument."""
    return [
        f"{path} is {shown(flat[path])}, but {name} is {shown(value)}"
        for path, (name, value) in known.items()
        if flat.get(path) not in (None, AUTO, value)
    ]


def _refuse_mismatches(mismatches: list[str], arguments: str) -> None:
    if mismatches:
        lines = "".join(f"\n- {line}" for line in mismatches)
        raise ConfigError(
            f"The zeroamp config and {arguments} disagree:{lines}\nCorrect one of the two, or write "
            '"auto" in the config, to use the value of the argument.'
        )

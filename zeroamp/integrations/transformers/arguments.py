"""`ZeroampTrainingArguments`, and `fill_auto`, which fills a config's "auto" values from a Trainer's arguments."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from zeroamp.policies.auto_values import AUTO, DERIVED, open_auto_keys
from zeroamp.policies.dtypes import DTYPE_BY_NAME
from zeroamp.policies.errors import ConfigError, shown, some_of
from zeroamp.policies.json_values import flatten, load_config, nest
from zeroamp.policies.key_names import rename_keys

ZeroampConfig = str | os.PathLike[str] | Mapping[str, Any]
"""The path of a JSON file, or a mapping with its content."""

_AUTOCAST = "torch_autocast"
_OF_STEPS = ("scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps")


@dataclass
class ZeroampArguments:
    """Adds the field `zeroamp` to other arguments: `class Arguments(ZeroampArguments, SFTConfig)`.

    Put it before the other class. `class Arguments(ZeroampTrainingArguments, SFTConfig)` would have the defaults of
    `TrainingArguments` instead of those of `SFTConfig`.
    """

    # `dict` and `str` as in `TrainingArguments.deepspeed`: HfArgumentParser takes the path from the command line.
    zeroamp: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "The zeroamp config: the path of a JSON file, or a dict. Its auto values are filled."},
    )

    def __post_init__(self) -> None:
        """Parse a dict that the command line passes as text, then call the next class's `__post_init__`."""
        if isinstance(self.zeroamp, str) and self.zeroamp.lstrip().startswith("{"):
            self.zeroamp = load_config_text(self.zeroamp)
        following: Any = super()
        following.__post_init__()


@dataclass
class ZeroampTrainingArguments(ZeroampArguments, TrainingArguments):  # type: ignore[misc]
    """`TrainingArguments` with the field `zeroamp`."""


def load_config_text(text: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ConfigError: the text is not a JSON object.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"zeroamp begins with a brace, but is not a JSON object: {error}. Write a path, or JSON."
        ) from None
    return dict(value)


def fill_auto(
    config: ZeroampConfig,
    args: TrainingArguments,
    model: nn.Module | None = None,
    num_training_steps: int | None = None,
) -> dict[str, Any]:
    """Return the config with its "auto" values filled from the arguments, by the rules of transformers for DeepSpeed.

    A key with another value must agree with its argument. `gradient_accumulation_steps` and `gradient_clipping` are
    taken from the arguments if the config lacks them. The arguments `bf16` and `fp16` mean autocast, as in a Trainer: a
    config without a precision mode gets `torch_autocast`.

    Args:
        config: the path of a JSON file, or a mapping. It is not changed.
        args: the Trainer's arguments.
        model: its `config.hidden_size` fills bucket sizes and thresholds. None leaves them "auto".
        num_training_steps: optimizer steps of the run, for `scheduler`. None leaves its keys "auto".

    Raises:
        ConfigError: arguments and keys disagree (the error names all of them), or an "auto" cannot be filled.
    """
    flat = rename_keys(flatten(load_config(config)))
    mismatches = _fill_precision(flat, args)
    known = _known(args, num_training_steps)
    for path, (name, value) in known.items():
        found = flat.get(path)
        if found is not None and found != AUTO and found != value:
            mismatches.append(f"{path} is {shown(found)}, but {name} is {shown(value)}")
    if mismatches:
        lines = "".join(f"\n- {line}" for line in mismatches)
        raise ConfigError(
            f"The zeroamp config and the TrainingArguments disagree:{lines}\nCorrect one of the two, or write "
            '"auto" in the config, to use the value of the argument.'
        )
    for path in ("gradient_accumulation_steps", "gradient_clipping"):
        flat.setdefault(path, known[path][1])
    values = {"scheduler.params.warmup_min_lr": 0, **{path: value for path, (_, value) in known.items()}}
    _fill(flat, values, model, is_last_pass=num_training_steps is not None)
    return nest(flat)


def _known(args: TrainingArguments, num_training_steps: int | None) -> dict[str, tuple[str, Any]]:
    """Return {config key: (name of the argument that fills it, its value)}."""
    micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    known: dict[str, tuple[str, Any]] = {
        "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", micro),
        "gradient_accumulation_steps": ("gradient_accumulation_steps", accumulation),
        "train_batch_size": ("the train batch size of all ranks", args.world_size * micro * accumulation),
        "gradient_clipping": ("max_grad_norm", args.max_grad_norm),
        "optimizer.params.lr": ("learning_rate", args.learning_rate),
        "optimizer.params.betas": ("[adam_beta1, adam_beta2]", [args.adam_beta1, args.adam_beta2]),
        "optimizer.params.eps": ("adam_epsilon", args.adam_epsilon),
        "optimizer.params.weight_decay": ("weight_decay", args.weight_decay),
        "scheduler.params.warmup_max_lr": ("learning_rate", args.learning_rate),
    }
    if num_training_steps is not None:
        warmup = max(1, args.get_warmup_steps(num_training_steps))
        known["scheduler.params.total_num_steps"] = "the number of training steps", num_training_steps
        known["scheduler.params.warmup_num_steps"] = "warmup_steps", warmup
    return known


def _fill_precision(flat: dict[str, Any], args: TrainingArguments) -> list[str]:
    """Fill the precision mode in `flat`. Return a line for each key that disagrees with the arguments."""
    name = args.mixed_precision  # from the arguments bf16 and fp16, or from `accelerate launch --mixed_precision`
    asked = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
    if asked is None and name != "no":
        return [f"the precision is {shown(name)}, which zeroamp does not have"]
    long_name = str(asked).removeprefix("torch.")
    enabled, dtype = f"{_AUTOCAST}.enabled", f"{_AUTOCAST}.dtype"
    if flat.get(enabled) == AUTO:
        flat[enabled] = asked is not None
    is_autocast = bool(flat.get(enabled))
    if flat.get(dtype) == AUTO and asked is None:
        del flat[dtype]
    mismatches = []
    for block in ("bf16", "fp16"):
        is_asked = block == name
        found = flat.get(f"{block}.enabled")
        if found == AUTO:
            flat[f"{block}.enabled"] = is_asked and not is_autocast
        elif found is not None and bool(found) != is_asked and not (is_autocast and not found):
            mismatches.append(f"{block}.enabled is {shown(found)}, but the argument {block} is {shown(is_asked)}")
    if asked is None or mismatches or any(flat.get(f"{block}.enabled") for block in ("bf16", "fp16")):
        return mismatches
    if flat.setdefault(enabled, True) is False:
        return [f"{enabled} is false, but the argument {name} is true"]
    if flat.get(dtype, AUTO) == AUTO:
        flat[dtype] = long_name
    elif DTYPE_BY_NAME.get(str(flat[dtype]).removeprefix("torch.")) != asked:
        return [f"{dtype} is {shown(flat[dtype])}, but the argument {name} is true"]
    return []


def _fill(flat: dict[str, Any], known: dict[str, Any], model: nn.Module | None, is_last_pass: bool) -> None:
    width = hidden_size(model)
    by_width = DERIVED["hidden_size"]
    left = []
    for path in open_auto_keys(nest(flat)):
        if path in known:
            flat[path] = known[path]
        elif path in by_width and width is not None:
            flat[path] = by_width[path](width)
        elif not (path in by_width and model is None) and (is_last_pass or path not in _OF_STEPS):
            left.append(path)
    if left:
        raise ConfigError(
            f'{some_of(left)} must have a value, but is "auto": neither an argument nor the hidden_size of the '
            "model's config gives one. Write a value, or remove the key."
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

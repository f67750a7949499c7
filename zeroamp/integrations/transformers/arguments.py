"""`ZeroampTrainingArguments`, and `fill_auto`, which fills a config's "auto" values from a Trainer's arguments."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import TrainingArguments

from zeroamp.integrations.accelerate.arguments import asked_precision
from zeroamp.integrations.config_values import fill_precision, flat_config, mismatches_of, refuse_mismatches
from zeroamp.policies.auto_values import DERIVED, open_auto_keys
from zeroamp.policies.errors import ConfigError, some_of
from zeroamp.policies.json_values import nest
from zeroamp.policies.policy import ConfigLike

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


@dataclass
class ZeroampTrainingArguments(ZeroampArguments, TrainingArguments):  # type: ignore[misc]
    """`TrainingArguments` with the field `zeroamp`."""


def fill_auto(
    config: ConfigLike,
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
    flat, known = flat_config(config), _known(args, num_training_steps)
    asked = asked_precision({"mixed_precision": args.mixed_precision})
    refuse_mismatches(fill_precision(flat, asked or "no") + mismatches_of(flat, known), "the TrainingArguments")
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

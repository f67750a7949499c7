"""`ZeroampTrainingArguments`, `fill_auto`, which fills a config from a Trainer's arguments, and what is refused."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from zeroamp.integrations.accelerate.arguments import asked_precision
from zeroamp.integrations.config_values import CLIPPING, STEPS, KnownValues, fill_config
from zeroamp.module_dtypes.patterns import find_matches
from zeroamp.planning.parameter_uses import modules_around
from zeroamp.policies.auto_wrap import named_by
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.policy import ConfigLike

REFUSED: Mapping[str, str] = {
    "fsdp": "zeroamp shards the model itself. Leave it out, and set zero_optimization.stage in the config.",
    "deepspeed": "zeroamp replaces DeepSpeed. Leave it out, and pass the file as zeroamp instead.",
    "parallelism_config": (
        "A Trainer gives each rank its own samples. Leave it out. For tensor or context parallelism, write a loop with "
        "zeroamp.wrap_model: docs/meshes.md."
    ),
    "auto_find_batch_size": (
        "An out-of-memory error on one rank leaves the others in a collective. Leave it out; `zeroamp plan` computes "
        "the largest batch before the run."
    ),
    "fp16_full_eval": "It casts the model, whose shards are the master weights. Evaluation has the config's autocast.",
    "bf16_full_eval": "It casts the model, whose shards are the master weights. Evaluation has the config's autocast.",
    "save_on_each_node": "Each rank writes its own part of a checkpoint. Set output_dir to a shared file system.",
    "enable_jit_checkpoint": (
        "All ranks must save at the same optimizer step, but the signal may reach them in different ones. Use "
        "the callback that docs/transformers.md shows."
    ),
}
"""Argument -> why it is refused if it is set."""


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
    return fill_config(
        config,
        _known(args, num_training_steps),
        precision=asked_precision(args.mixed_precision) or "no",
        arguments="the TrainingArguments",
        model=model,
        is_complete=model is not None,
    )


def with_head_in_fp32(filled: dict[str, Any], model: nn.Module | None) -> dict[str, Any]:
    """Return the config for a loss that reads the head's weight outside of its module, and adds its gradients in fp32.

    `own_units` is false if the config does not set it. Under autocast an override of the head is added.
    """
    keys = {"own_units": False} | filled.get("zeroamp", {})
    if model is not None and filled.get("torch_autocast", {}).get("enabled"):
        own = keys.get("overrides", ())
        keys["overrides"] = [*own, *override_of_head(model, own)]
    return {**filled, "zeroamp": keys}


def override_of_head(model: Any, own: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """Yield an override for a trained head that is not tied: a tied one is in fp32 by the class of the embedding.

    Nothing is yielded if one of `own`, the overrides of the config, applies to the head: only the first that matches
    would apply.
    """
    head, embedding = named_by(model, "get_output_embeddings"), named_by(model, "get_input_embeddings")
    weight = getattr(head, "weight", None)
    if weight is None or not weight.requires_grad or weight.dtype != torch.float32:
        return
    if weight is getattr(embedding, "weight", None):
        return
    name = next(fqn for fqn, module in model.named_modules() if module is head)
    around = {"", name, *modules_around(name)}
    patterns = ([each["modules"]] if isinstance(each["modules"], str) else each["modules"] for each in own)
    if all(around.isdisjoint(find_matches(model, pattern).modules) for pattern in chain.from_iterable(patterns)):
        yield {"modules": name, "param": "fp32", "communication": "fp32"}


def _known(args: TrainingArguments, num_training_steps: int | None) -> KnownValues:
    micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    known: dict[str, tuple[str, Any]] = {
        "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", micro),
        STEPS: ("gradient_accumulation_steps", accumulation),
        "train_batch_size": ("the train batch size of all ranks", args.world_size * micro * accumulation),
        CLIPPING: ("max_grad_norm", args.max_grad_norm),
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


def refuse_arguments(args: TrainingArguments, reasons: Mapping[str, str]) -> None:
    """Raise ConfigError for arguments of the Trainer that a wrapped model cannot honour. It names all of them.

    `reasons`: {argument: why it is refused if it is set}.
    """
    refused = [(name, reason) for name, reason in reasons.items() if getattr(args, name, None)]
    if args.n_gpu > 1:
        refused.append(
            ("n_gpu", f"One process has {args.n_gpu} GPUs, which DataParallel would use. Start it with torchrun.")
        )
    if refused:
        lines = "".join(f"\n- {name}: {reason}" for name, reason in refused)
        raise ConfigError(f"zeroamp does not support these {type(args).__name__}:{lines}")

"""Options of the fine-tuning example: the config with its batch sizes, and what a resumed run may change."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from _output import Run

BATCH_SIZES = {
    "train_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "grad_accum",
}
"""Key of the config -> the option that sets it."""


class OptionError(ValueError):
    """An option cannot be used. The message names it, the problem and the remedy."""


def positive_int(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {value}; give 1 or more")
    return value


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """The config in the file --config, with the batch sizes of the command line."""
    try:
        config = json.loads(args.config.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise OptionError(f"--config {args.config}: not valid JSON ({error}). Correct the file.") from error
    if not isinstance(config, dict):
        raise OptionError(f"--config {args.config}: must be a JSON object, but is a {type(config).__name__}.")
    asked = {key: getattr(args, option) for key, option in BATCH_SIZES.items()}
    return config | {key: value for key, value in asked.items() if value is not None}


def options_of(args: argparse.Namespace) -> dict[str, str]:
    """What a run stores of its options: their texts, the config without batch sizes, and the SHA-256 of the data."""
    config = {key: value for key, value in read_config(args).items() if key not in BATCH_SIZES}
    content = "" if args.data is None else hashlib.sha256(args.data.read_bytes()).hexdigest()
    options = {name: str(value) for name, value in vars(args).items()}
    return options | {"content of --config": json.dumps(config), "content of --data": content}


def refuse_other_options(run: Run, options: dict[str, str]) -> None:
    """Raise OptionError if an option that a resumed run cannot change has another value than at its start."""
    # Learning rates are the checkpoint's.
    for name in ("model", "seed", "seq_len", "mask_prompt", "lr", "warmup"):
        if (before := run.args.get(name, options[name])) != options[name]:
            raise OptionError(
                f"--{name.replace('_', '-')} was {before} when the run began, but is {options[name]}. Pass the value "
                "from its start to go on, or another --out to begin anew."
            )
    # The file may have moved. An older run stored its path alone.
    name = "content of --data" if "content of --data" in run.args else "data"
    if run.args.get(name, options[name]) != options[name]:
        raise OptionError(
            f"--data {options['data']} has other content than --data {run.args['data']} when the run began. Pass that "
            "data to go on, or another --out to begin anew."
        )


def notes_on_start(run: Run, options: dict[str, str], max_length: int | None) -> Iterator[str]:
    """Yield lines about what the user may not have meant, at a first start or a later one."""
    if max_length is not None and int(options["seq_len"]) > max_length:
        yield f"--seq-len {options['seq_len']} is more than the {max_length} tokens that the model was made for"
    config = "content of --config"
    before, now = (json.loads(each.get(config, options[config])) for each in (run.args, options))
    if changed := sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key)):
        yield f"the config has other values than when the run began: {', '.join(changed)}"
    has_scheduler = json.loads(options[config]).get("scheduler") is not None  # the config's does not depend on --steps
    if not has_scheduler and (steps := run.args.get("steps", options["steps"])) != options["steps"]:
        yield f"--steps was {steps} when the run began: the learning rate now falls until step {options['steps']}"
    if len(run.losses) >= int(options["steps"]):
        yield f"{len(run.losses)} steps are done, so --steps {options['steps']} trains nothing more"

"""`zeroamp sensitivity`: runs `zeroamp.sensitivity` on a saved model of transformers, in one process."""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import zeroamp
from zeroamp.cli.arguments import add_config, file, positive
from zeroamp.cli.model_source import load_model
from zeroamp.policies.errors import ConfigError


def sensitivity(options: Namespace) -> str:
    """Measure what low precision of each group of modules costs, and which modules to keep in fp32.

    zeroamp sensitivity zero.json --model FOLDER --text corpus.txt
    Runs in one process, on its GPU if it has one. Training jobs of several ranks call zeroamp.sensitivity.
    """
    if (num_ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ConfigError(
            f"zeroamp sensitivity runs in one process, but torchrun started {num_ranks}. Leave torchrun out, or call "
            "zeroamp.sensitivity(model, batches) on all ranks of the job."
        )
    policy = zeroamp.policy_from_config(options.config, world_size=1, **dict(options.auto))
    batch = _rows(options) if options.batch is None else _tensors(options.batch)
    model = zeroamp.wrap_model(load_model(str(options.model)), policy)
    zeroamp.load_hf(model, options.model)
    groups = options.groups[0] if options.groups[0] in ("class and role", "depth") else options.groups
    found = zeroamp.sensitivity(model, [batch], groups=groups, budget=options.budget)
    if options.json is not None:
        options.json.write_text(found.to_json(), encoding="utf-8")
    return str(found)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `zeroamp sensitivity`."""
    add_config(parser)
    add = parser.add_argument
    add("--model", metavar="FOLDER", type=Path, required=True, help="config.json and safetensors files.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", metavar="FILE", type=file, help="Text for the model's tokenizer, in its folder.")
    help = "Arguments of the forward, by name, with labels."
    source.add_argument("--batch", metavar="FILE.safetensors", type=file, help=help)
    add("--samples", metavar="N", type=positive, default=16, help="Samples of --text. Default: 16.")
    add("--seq", metavar="N", type=positive, default=128, help="Tokens of a sample of --text. Default: 128.")
    help = '"class and role" (the default), "depth", or patterns of modules.'
    add("--groups", metavar="GROUP", nargs="+", default=["class and role"], help=help)
    help = "The largest change of the gradient that you accept, such as 0.01. Default: the noise of the batch."
    add("--budget", metavar="X", type=float, help=help)
    add("--json", metavar="FILE", type=Path, help="Also write all numbers, as JSON.")


def _rows(options: Namespace) -> dict[str, Any]:
    """Return the first tokens of the text, in rows."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True, trust_remote_code=False)
    tokens = torch.tensor(tokenizer(options.text.read_text(encoding="utf-8"))["input_ids"], dtype=torch.int64)
    num = min(options.samples, len(tokens) // options.seq)
    if num < 2:
        raise ConfigError(
            f"--text {options.text} has {len(tokens)} tokens, but two samples of {options.seq} are needed. Pass more "
            "text, or a smaller --seq."
        )
    rows = tokens[: num * options.seq].view(num, options.seq)
    return {"input_ids": rows, "labels": rows, "use_cache": False}


def _tensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--batch {path} is not a safetensors file: {error}. Write it with save_file.") from error

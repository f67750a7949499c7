"""`zeroamp sensitivity`: runs `zeroamp.sensitivity` on a saved model of transformers, in one process or several."""

import json
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zeroamp
from zeroamp.cli.arguments import add_config, add_html, file, positive
from zeroamp.cli.model_source import load_model
from zeroamp.policies.errors import ConfigError
from zeroamp.reporting.page import check_file, check_page, write_page

if TYPE_CHECKING:
    from torch import nn

    from zeroamp.policies.policy import Policy
    from zeroamp.wrapping.run_alike import Description


def sensitivity(options: Namespace) -> str:
    """Measure what low precision of each group of modules costs, and which modules to keep in fp32.

    zeroamp sensitivity zero.json --model FOLDER --text corpus.txt
    torchrun --nproc-per-node 2 -m zeroamp sensitivity zero.json --model FOLDER --text corpus.txt
    The ranks of torchrun share the samples equally, and the first one prints.
    """
    import torch
    import torch.distributed as dist

    from zeroamp.planning.mesh import current_device_type, start_process_group
    from zeroamp.wrapping.run_alike import run_alike

    starts_group = not dist.is_initialized()
    if starts_group:
        start_process_group()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model, policy, batch = run_alike(
        partial(_prepared, options, rank, num_ranks),
        what="zeroamp sensitivity",
        remedy="",
        error_type=ConfigError,
        group=None,
        device=torch.device(current_device_type()),
    )
    model = zeroamp.wrap_model(model, policy)
    zeroamp.load_hf(model, options.model)
    groups = options.groups[0] if options.groups[0] in ("class and role", "depth") else options.groups
    found = zeroamp.sensitivity(model, [batch], groups=groups, budget=options.budget, quick=options.quick)
    if starts_group:
        dist.destroy_process_group()
    if rank > 0:
        return ""
    if options.json is not None:
        options.json.write_text(found.to_json(), encoding="utf-8")
    title, data = f"Sensitivity of {Path(options.model).name}", json.loads(found.to_json())
    write_page(options.html, "sensitivity", title, found.title(), data, {"Config": policy.to_config()})
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
    add("--quick", action="store_true", help="Measure only the ten groups with the most bytes.")
    help = "The largest change of the gradient that you accept, such as 0.01. Default: the noise of the batch."
    add("--budget", metavar="X", type=float, help=help)
    add("--json", metavar="FILE", type=Path, help="Also write all numbers, as JSON.")
    add_html(parser)


def _prepared(
    options: Namespace, rank: int, num_ranks: int
) -> "tuple[tuple[nn.Module, Policy, dict[str, Any]], Description]":
    """Return the model on the meta device, the policy, and this rank's samples. Checks the files to write."""
    if rank == 0:
        check_page(options.html)
        if options.json is not None:
            check_file(options.json, "--json")
    policy = zeroamp.policy_from_config(options.config, world_size=num_ranks, **dict(options.auto))
    batch = _rows(options) if options.batch is None else _tensors(options.batch)
    return (load_model(str(options.model)), policy, _part(batch, rank, num_ranks)), {}


def _part(batch: dict[str, Any], rank: int, num_ranks: int) -> dict[str, Any]:
    """Return every `num_ranks`-th sample, so that the halves of the ranks' parts are those of the batch."""
    from zeroamp.hooks.tensors import map_tensors, tensors_in

    num = next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 0)
    if num % num_ranks:
        raise ConfigError(
            f"{num_ranks} ranks cannot share {num} samples equally. Pass a multiple of {num_ranks}, by --samples or in "
            "the file of --batch, or start another number of ranks."
        )
    part: dict[str, Any] = map_tensors(
        lambda each: each[rank::num_ranks] if each.dim() and len(each) == num else each, batch
    )
    return part


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

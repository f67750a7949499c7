"""Inputs of a model in a dry run, by batch and sequence length."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zeroamp.discovery.fake_run import example_arguments
from zeroamp.policies.errors import ConfigError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""(args, kwargs) of the forward; only shapes and dtypes matter."""
InputFactory = Callable[[int, int], Any]
"""(batch, sequence length) -> a tuple of arguments of the forward, a mapping of keyword arguments, or a tensor."""


def arguments_for(model: nn.Module, batch: int, seq: int, inputs: InputFactory | None) -> Arguments:
    """Return (args, kwargs) of the forward, on the meta device: a planned batch may be larger than any memory.

    Without `inputs` they are those of a transformers language model: token ids and labels, int64 of shape [batch, seq],
    without a cache of keys and values.

    Raises:
        ConfigError: `inputs` is None, and the model is not a transformers language model.
    """
    if inputs is not None:
        with torch.device("meta"):
            return example_arguments(model, inputs(batch, seq))
    if getattr(model, "main_input_name", None) != "input_ids" or not hasattr(model, "config"):
        raise ConfigError(
            f"{type(model).__name__} is not a transformers language model, so its inputs are not known. Pass a "
            "function of (batch, sequence length) that returns the forward's arguments: inputs=function, or "
            "--inputs package.module:function."
        )
    tokens = torch.empty(batch, seq, dtype=torch.long, device="meta")
    return (), {"input_ids": tokens, "labels": torch.empty_like(tokens), "use_cache": False}


@contextmanager
def sequences_are_not_packed() -> Iterator[None]:
    """Make transformers assume one sequence per row, as it detects on real tensors.

    On fake tensors it cannot read the position ids. It would build a mask over all pairs of tokens, which rules out
    flash attention.
    """
    masking = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    if masking is None or not hasattr(masking, name):
        yield
        return
    before = getattr(masking, name)
    setattr(masking, name, lambda *_args, **_kwargs: None)
    try:
        yield
    finally:
        setattr(masking, name, before)

"""What a model is called with in a dry run, by batch and sequence length."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zeroamp.planning.example_inputs import example_arguments
from zeroamp.policies.errors import ConfigError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""(args, kwargs) of the forward; only shapes and dtypes matter."""
InputFactory = Callable[[int, int], Any]
"""(batch, sequence length) -> a tuple of arguments of the forward, a mapping of keyword arguments, or a tensor."""


def arguments_for(model: nn.Module, batch: int, seq: int, inputs: InputFactory | None) -> Arguments:
    """Return (args, kwargs) of the forward, on the meta device: the largest batch may be one that no memory holds.

    Without `inputs`, those of a transformers language model: token ids and labels, int64 of shape [batch, seq], and no
    cache of keys and values, which training has no use for.

    Raises:
        ConfigError: there are no `inputs`, and the model is no transformers language model.
    """
    if inputs is not None:
        with torch.device("meta"):
            return example_arguments(model, inputs(batch, seq))
    if getattr(model, "main_input_name", None) != "input_ids" or not hasattr(model, "config"):
        raise ConfigError(
            f"{type(model).__name__} needs inputs, since it is no language model of transformers. Pass a function of "
            "(batch, sequence length) that returns what the forward takes: inputs=function, or "
            "--inputs package.module:function."
        )
    tokens = torch.empty(batch, seq, dtype=torch.long, device="meta")
    return (), {"input_ids": tokens, "labels": torch.empty_like(tokens), "use_cache": False}


@contextmanager
def sequences_are_not_packed() -> Iterator[None]:
    """Let transformers assume one sequence per row, as it finds on real tensors.

    On fake ones it cannot look, and makes a mask of all pairs of tokens, with which there is no flash attention.
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

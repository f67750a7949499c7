"""Turns `example_inputs`, or a transformers model's dummy inputs, into the arguments of a forward."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zeroamp.policies.errors import ConfigError, describe


def example_arguments(
    model: nn.Module, example_inputs: Any = None, needed_by: str = ""
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) for `model(*args, **kwargs)`.

    Args:
        model: whose forward gets the arguments.
        example_inputs: a tuple of positional arguments, a mapping of keyword arguments, or one tensor. None stands for
            the `dummy_inputs` of a transformers model.
        needed_by: the config key that needs the inputs, for the error.

    Raises:
        ConfigError: `example_inputs` has another type, or is None for a model without dummy inputs.
    """
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if example_inputs is not None:
        raise ConfigError(
            describe(
                "example_inputs",
                f"a {type(example_inputs).__name__}",
                "a tuple of positional arguments, a mapping of keyword arguments, or a tensor",
                "Wrap it: example_inputs=(value,) calls model(value).",
            )
        )
    return (), _dummy_inputs(model, needed_by)


def _dummy_inputs(model: nn.Module, needed_by: str) -> dict[str, Any]:
    dummy = getattr(model, "dummy_inputs", None)
    # transformers' base class returns token ids for every model, also for a vision model.
    main_input = getattr(model, "main_input_name", "input_ids")
    if isinstance(dummy, Mapping) and main_input in dummy:
        return dict(dummy)
    why = "" if dummy is None else f", and dummy_inputs of {type(model).__name__} have no {main_input!r}"
    remedy = (
        'a batch, as a tuple (args) or a dict (kwargs): {"input_ids": torch.zeros(2, 8, dtype=torch.long)}. Only '
        "shapes, dtypes and structure matter."
    )
    if needed_by:
        raise ConfigError(
            f"{needed_by} needs inputs of the model's forward, but none were passed{why}. Pass example_inputs: {remedy}"
            " On the command line, name a function that returns them: --inputs file.py:function."
        )
    raise ConfigError(f"example_inputs must be inputs of the model's forward, but none were passed{why}. Pass {remedy}")

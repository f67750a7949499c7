"""Maps optimizers and parameter lists that were made before `initialize` to the sharded parameters."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

from zeroamp.optimizers.parameters_before import ParametersBefore
from zeroamp.policies.errors import StepError

REPLACED = "_zeroamp_replaced"
"""Attribute that marks a parameter that `initialize` has replaced. A script may still refer to it."""


def mark_replaced(before: ParametersBefore) -> None:
    """Mark the parameters from before the wrap, so that using them raises an error."""
    for parameter in before.replaced():
        vars(parameter)[REPLACED] = True


def refuse_foreign(before: ParametersBefore, optimizer: Any, model_parameters: list[Any]) -> None:
    """Check, before the model is wrapped, that all given parameters are the model's.

    Raises:
        StepError: an optimizer or `model_parameters` holds a parameter that the model does not have.
    """
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ()
    listed_groups = [one["params"] if isinstance(one, dict) else [one] for one in model_parameters]
    for holder, held in (
        ("initialize(optimizer=)", [group["params"] for group in groups]),
        ("initialize(model_parameters=)", listed_groups),
    ):
        for parameter in chain.from_iterable(held):
            if not before.holds(parameter):
                raise _foreign(parameter, holder)


def sharded_list(before: ParametersBefore, parameters: Iterable[Any]) -> list[Any]:
    """Replace the parameters in a list of parameters or param groups by the sharded ones.

    Raises:
        StepError: the model did not have one of them.
    """
    return [
        {**each, "params": sharded_list(before, _listed(each["params"]))}
        if isinstance(each, dict)
        else _sharded(before, each, "initialize(model_parameters=)")
        for each in parameters
    ]


def repoint(before: ParametersBefore, optimizer: torch.optim.Optimizer) -> None:
    """Replace an optimizer's parameters by the sharded ones, in place, and shard its state like them.

    Raises:
        StepError: the model did not have one of its parameters, or its state cannot be sharded.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _sharded(before, parameter, "initialize(optimizer=)")
    before.repoint([optimizer])


def _sharded(before: ParametersBefore, parameter: Any, holder: str) -> nn.Parameter:
    sharded = before.sharded(parameter)
    if not before.holds(parameter) or not isinstance(sharded, nn.Parameter):
        raise _foreign(parameter, holder)
    return sharded


def _foreign(parameter: torch.Tensor, holder: str) -> StepError:
    return StepError(
        f"{holder} has a parameter of shape {tuple(parameter.shape)} that is not one of the model given to "
        "initialize(). Pass parameters of that model."
    )


def listed(model_parameters: Any) -> list[Any]:
    """Return `initialize(model_parameters=)` as a list. It may be an iterator, which is invalid after the wrap.

    Param groups are copied, and their `params` become lists.
    """
    each = _listed(model_parameters)
    return [{**one, "params": _listed(one["params"])} if isinstance(one, dict) else one for one in each]


def _listed(parameters: Any) -> list[Any]:
    if isinstance(parameters, torch.Tensor | dict):
        return [parameters]
    # Helpers of transformers and others return pairs of name and parameter.
    return [each[1] if isinstance(each, tuple) else each for each in parameters]

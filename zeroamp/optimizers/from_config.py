"""Builds the torch optimizer of the config's `optimizer` block."""

import os
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from zeroamp.optimizers.bf16_states import Bf16StatesAdamW
from zeroamp.optimizers.optimizer_params import AdamParams, SGDParams
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.policy import Policy, policy_from_config

PolicyLike = Policy | Mapping[str, Any] | str | os.PathLike[str]
"""A `Policy`, or a config for `policy_from_config`: a mapping or the path of a JSON file."""


def optimizer_from_config(cfg: PolicyLike, params: ParamsT, /, **auto: Any) -> torch.optim.Optimizer:
    """Build the optimizer of the config's `optimizer` block. Call it after `wrap_model`.

    The optimizer is a class of `torch.optim`. DeepSpeed's "Adam" is `AdamW` unless adam_w_mode is false. On CUDA
    devices it is fused, unless `params` of the block has "fused" or "foreach".

    Args:
        cfg: a `Policy`, or a config for `policy_from_config`: a mapping or the path of a JSON file.
        params: `model.parameters()`, or param groups as in torch's optimizers. Entries of a group override the config.
        auto: keyword arguments of `policy_from_config`. Must be empty if `cfg` is a `Policy`.

    Raises:
        ConfigError: the config is invalid, or has no `optimizer`.
    """
    policy = policy_of(cfg, auto)
    block = policy.optimizer
    if block is None:
        raise ConfigError(
            'The config has no "optimizer". Add it, such as {"type": "AdamW", "params": {"lr": 1e-3}}, or build the '
            "optimizer yourself."
        )
    settings = block.params
    held: list[Any] = list(params)
    if isinstance(settings, SGDParams):
        return torch.optim.SGD(held, **_arguments(settings, torch.optim.SGD) | _implementation(settings, held))
    optimizer_class = torch.optim.AdamW if settings.adam_w_mode else torch.optim.Adam
    decay = {"weight_decay": settings.weight_decay_or_default}
    if policy.optimizer_states_dtype is not None:
        return Bf16StatesAdamW(held, **_arguments(settings, Bf16StatesAdamW) | decay)
    arguments = _arguments(settings, optimizer_class) | decay
    return optimizer_class(held, **arguments | _implementation(settings, held))


def _implementation(settings: AdamParams | SGDParams, params: Sequence[Any]) -> dict[str, bool]:
    """Return `fused=True` if the config sets neither `fused` nor `foreach` and all parameters are on CUDA devices.

    The fused kernel reads and writes each value once. On a CPU, fused AdamW rounds differently from torch's default, so
    it is used there only if `optimizer.params.fused` is true.
    """
    if settings.fused is not None or settings.foreach is not None:
        return {}
    items = [item[-1] if isinstance(item, tuple) else item for item in _items(params)]  # named parameters are pairs
    return {"fused": True} if {item.device.type for item in items} == {"cuda"} else {}


def _items(params: Sequence[Any]) -> Iterator[Any]:
    """Yield the parameters, or pairs of a name and a parameter, also those inside param groups."""
    for entry in params:
        held = entry["params"] if isinstance(entry, dict) else entry
        yield from [held] if isinstance(held, torch.Tensor | tuple) else held


def _arguments(settings: AdamParams | SGDParams, optimizer_class: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the keys of the block that are also arguments of torch's optimizer."""
    return settings.model_dump(include=set(signature(optimizer_class).parameters))


def policy_of(cfg: PolicyLike, auto: Mapping[str, Any]) -> Policy:
    """Return `cfg` if it is a policy, else the policy that `policy_from_config(cfg, **auto)` returns.

    Raises:
        ConfigError: the config is invalid, or `cfg` is a policy and `auto` is not empty.
    """
    if not isinstance(cfg, Policy):
        return policy_from_config(cfg, **auto)
    if auto:
        names = ", ".join(sorted(auto))
        raise ConfigError(
            f"{names} was given beside a Policy, whose values are already set. Pass it to policy_from_config instead."
        )
    return cfg

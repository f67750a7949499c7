"""The torch optimizer that the config's `optimizer` block asks for."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from zeroamp.policies import ConfigError, Policy, policy_from_config
from zeroamp.policies.schema import AdamParams, SGDParams

PolicyLike = Policy | Mapping[str, Any] | str | os.PathLike[str]
"""A policy, or what `policy_from_config` reads: a mapping, or the path of a JSON file."""


def optimizer_from_config(cfg: PolicyLike, params: ParamsT, /, **auto: Any) -> torch.optim.Optimizer:
    """Build the optimizer of the config's `optimizer` block. Call it after `wrap_model`.

    It is torch's own: DeepSpeed's "Adam" is `torch.optim.AdamW` unless adam_w_mode is false.

    Args:
        cfg: a policy, or what `policy_from_config` takes.
        params: `model.parameters()`, or param groups whose own entries win, as torch's optimizers take them.
        auto: what `policy_from_config` takes beside a config; nothing with a policy.

    Raises:
        ConfigError: the config is wrong, or has no `optimizer`.
    """
    block = policy_of(cfg, auto).optimizer
    if block is None:
        raise ConfigError(
            'The config has no "optimizer". Add it, such as {"type": "AdamW", "params": {"lr": 1e-3}}, or build the '
            "optimizer yourself."
        )
    if isinstance(block.params, SGDParams):
        return _sgd(block.params, params)
    return _adam(block.params, params)


def policy_of(cfg: PolicyLike, auto: Mapping[str, Any]) -> Policy:
    """Return the policy that `cfg` is or describes.

    Raises:
        ConfigError: the config is wrong; or `auto` has values and `cfg` is a policy, whose values are settled.
    """
    if not isinstance(cfg, Policy):
        return policy_from_config(cfg, **auto)
    if auto:
        names = ", ".join(sorted(auto))
        raise ConfigError(
            f"{names} was given beside a Policy, whose values are settled. Give it to policy_from_config instead."
        )
    return cfg


def _adam(block: AdamParams, params: ParamsT) -> torch.optim.Optimizer:
    optimizer_class = torch.optim.AdamW if block.adam_w_mode else torch.optim.Adam
    return optimizer_class(
        params,
        lr=block.lr,
        betas=block.betas,
        eps=block.eps,
        weight_decay=block.weight_decay_or_default,
        amsgrad=block.amsgrad,
        maximize=block.maximize,
        foreach=block.foreach,
        fused=block.fused,
    )


def _sgd(block: SGDParams, params: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        params,
        lr=block.lr,
        momentum=block.momentum,
        dampening=block.dampening,
        weight_decay=block.weight_decay,
        nesterov=block.nesterov,
        maximize=block.maximize,
        foreach=block.foreach,
        fused=block.fused,
    )

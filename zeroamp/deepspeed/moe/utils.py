"""`deepspeed.moe.utils`: its functions for models without expert-parallel layers. Those layers are refused."""

from collections.abc import Iterable
from typing import Any

from torch import nn


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: int | None = None
) -> list[dict[str, Any]]:
    """Return the param groups as a list: without expert-parallel layers there is nothing to split."""
    del max_group_size
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


def is_moe_param(param: nn.Parameter) -> bool:
    """Return False: there are no expert-parallel layers."""
    del param
    return False


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return False and 0: there are no expert-parallel layers."""
    del m
    return False, 0

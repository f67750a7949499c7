"""Lets FSDP2 all-gather the planned weights in float8, by torchao's tensors: `zeroamp.param_gather_dtype`.

torchao is an extra (`zeroamp[float8]`). It is imported only if a plan has such weights.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib import metadata
from typing import cast

import torch
from torch import nn

from zeroamp.float8.chosen_weights import with_float8
from zeroamp.float8.conflicts import KEY, SCALES, check_float8
from zeroamp.hooks._torch.all_gather_extension import shards_of
from zeroamp.hooks.collectives.traffic import Traffic, TrafficKey
from zeroamp.hooks.root_forward import ForwardCall
from zeroamp.hooks.unit_hooks import wrap_forward
from zeroamp.planning.groups import ParamPlan
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.parameter_uses import ParameterUses
from zeroamp.planning.plan import Plan
from zeroamp.planning.safe_parameters import Precision
from zeroamp.policies.dtypes import FLOAT8_BY_NAME
from zeroamp.policies.errors import ConfigError, WrapError
from zeroamp.policies.extensions import Extension
from zeroamp.policies.policy import Policy
from zeroamp.wrapping.state import WrapState

LEAST_TORCHAO = (0, 18)


class Float8(Extension):
    """Lets FSDP2 all-gather weights of Linears in float8."""

    data_axes_only = KEY

    def check_config(self, policy: Policy) -> None:
        """Raise ConfigError for what the key may not be combined with."""
        check_float8(policy)

    def precisions(
        self, model: nn.Module, policy: Policy, uses: Sequence[ParameterUses], precisions: Iterable[Precision]
    ) -> Iterator[Precision]:
        """Yield the precisions, with those of the parameters that are all-gathered in float8 changed."""
        return with_float8(model, policy, uses, precisions)

    def check_model(self, model: nn.Module, plan: Plan) -> None:
        """Raise if torchao is missing, or the model has adapters."""
        del plan
        check_float8_model(model)

    def attach(self, model: nn.Module, state: WrapState) -> None:
        """Extend the all-gathers of the weights."""
        attach_float8(model, state)

    def add_traffic(self, plan: Plan, ranks: Ranks, traffic: Traffic) -> None:
        """Add the all-reduce of the scales, one fp32 number per weight."""
        del ranks
        key = TrafficKey("all_reduce", torch.float32, SCALES)
        traffic.calls[key] += 1
        traffic.num_bytes[key] += len(float8_params(plan)) * torch.float32.itemsize


def float8_params(plan: Plan) -> list[ParamPlan]:
    """Return the parameters of a plan that are all-gathered in float8."""
    return [param for param in plan.params if param.dtypes.param in FLOAT8_BY_NAME.values()]


def check_float8_model(model: nn.Module) -> None:
    """Raise if the weights that are planned in float8 cannot be all-gathered in it.

    Raises:
        ConfigError: torchao is not installed, or is too old.
        WrapError: the model has adapters of peft.
    """
    _check_torchao()
    for fqn, module in model.named_modules():
        if any(cls.__module__.startswith("peft.") for cls in type(module).__mro__):
            raise WrapError(
                f"{KEY} is not supported with adapters of peft ({fqn or 'the root'}): the frozen base is all-gathered "
                "as it is stored, so only the adapters would be rounded. Remove the key."
            )


def _check_torchao() -> None:
    least, install = ".".join(map(str, LEAST_TORCHAO)), "Install it: pip install 'zeroamp[float8]'. Or remove the key."
    try:
        version = metadata.version("torchao")
    except metadata.PackageNotFoundError:
        raise ConfigError(f"{KEY} needs torchao {least} or newer, which is not installed. {install}") from None
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < LEAST_TORCHAO:
        raise ConfigError(f"{KEY} needs torchao {least} or newer, but {version} is installed. {install}")


def attach_float8(model: nn.Module, state: WrapState) -> None:
    """Extend the all-gathers of the planned weights of a sharded model, and let their Linears divide by the scales."""
    from zeroamp.float8.scaled_weights import Float8Scales, Float8Weight, float8_forward  # they need torchao

    params = float8_params(state.plan)
    shards = list(shards_of(model, [param.fqn for param in params]))
    process_group = state.mesh.get_group(state.mesh.ndim - 1)
    runs_forward = partial(lambda forward: forward.depth > 0, state.root_forward)
    scales = Float8Scales(shards, process_group, state.listeners, runs_forward)
    for index, shard in enumerate(shards):
        shard.extend(Float8Weight(shard=shard, scale=partial(scales.of, index)))

    def before_forward(call: ForwardCall) -> AbstractContextManager[None] | None:
        if call.is_outermost:
            scales.prepare(may_differ=not state.step.is_open)
        return None

    state.root_forward.add("before unshard", before_forward)
    for fqn in dict.fromkeys(fqn for param in params for fqn in param.owner_fqns):
        linear = model.get_submodule(fqn)
        wrap_forward(linear, float8_forward(cast(nn.Linear, linear), state.mesh.device_type))

"""Lets FSDP2 all-gather some weights in float8, by torchao's tensors: `zeroamp.param_gather_dtype`.

These are the weights of Linears that would be all-gathered in the mode's low precision, if an `nn.Linear` is all that
reads them: not where a class computes with the weight itself, or an override names a dtype for it. torchao is an extra
(`zeroamp[float8]`). It is imported only if a plan has such weights.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import cast

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from zeroamp.float8.conflicts import KEY, SCALES, check_float8
from zeroamp.hooks._torch.all_gather_extension import shards_of
from zeroamp.hooks.collectives.traffic import Traffic, TrafficKey
from zeroamp.hooks.root_forward import ForwardCall
from zeroamp.hooks.unit_hooks import wrap_forward
from zeroamp.planning.groups import ParamPlan
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.parameter_uses import ParameterUses
from zeroamp.planning.plan import Plan
from zeroamp.planning.precisions import PlanExtension, Precision
from zeroamp.policies.dtypes import FLOAT8_BY_NAME, short_name, stored_dtype
from zeroamp.policies.errors import ConfigError, WrapError
from zeroamp.policies.policy import Policy
from zeroamp.wrapping.extensions import WrapExtension
from zeroamp.wrapping.state import WrapState

LEAST_TORCHAO = (0, 18)


class Float8(PlanExtension, WrapExtension):
    """Lets FSDP2 all-gather weights of Linears in float8."""

    data_axes_only = KEY

    def check_config(self, policy: Policy) -> None:
        """Raise ConfigError for what the key may not be combined with."""
        check_float8(policy)

    def precisions(
        self, model: nn.Module, policy: Policy, uses: Sequence[ParameterUses], precisions: Iterable[Precision]
    ) -> Iterator[Precision]:
        """Yield the precisions, with those of the parameters that are all-gathered in float8 changed.

        Raises:
            ConfigError: no parameter can be all-gathered in float8.
        """
        if policy.param_gather_dtype is None:
            raise AssertionError("expected a policy with param_gather_dtype")
        found = False
        for use, precision in zip(uses, precisions, strict=True):
            if not _is_chosen(use, precision):
                yield precision
                continue
            found = True
            reason = f"{precision.reason}; Linear weight: {KEY}"
            yield replace(precision, param=policy.param_gather_dtype, reason=reason)
        if not found:
            raise ConfigError(
                f'{KEY} is "{short_name(policy.param_gather_dtype)}", but {type(model).__name__} has no Linear whose '
                "fp32 weight would be all-gathered in bf16. Remove the key."
            )

    def check_model(self, model: nn.Module, plan: Plan) -> None:
        """Raise if torchao is missing, or the model has adapters."""
        del plan
        check_float8_model(model)

    def attach(self, model: nn.Module, state: WrapState) -> None:
        """Extend the all-gathers of the planned weights, and let their Linears divide by the scales."""
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

    def add_traffic(self, plan: Plan, ranks: Ranks, traffic: Traffic) -> None:
        """Add the all-reduce of the scales, one fp32 number per weight."""
        del ranks
        key = TrafficKey("all_reduce", torch.float32, SCALES)
        traffic.calls[key] += 1
        traffic.num_bytes[key] += len(float8_params(plan)) * torch.float32.itemsize


def _is_chosen(use: ParameterUses, precision: Precision) -> bool:
    is_low = precision.is_low and stored_dtype(use.parameter) == torch.float32 and not precision.is_overridden
    return is_low and all(name == "weight" and _computes_as_linear(owner) for owner, name in use.named_owners())


def _computes_as_linear(module: nn.Module) -> bool:
    """Return whether a module reads its weight by `nn.Linear.forward` alone.

    `nn.MultiheadAttention` reads the weight of its output projection itself, and does not call that Linear.
    """
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)  # the caller's own: an adapter, a kernel, a hook of accelerate
        and not isinstance(module, NonDynamicallyQuantizableLinear)
    )


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

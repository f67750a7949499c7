"""Lets FSDP2 all-gather the planned weights in float8, by torchao's tensors: `zeroamp.param_gather_dtype`.

torchao is an extra (`zeroamp[float8]`). It is imported only if a plan has such weights.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, cast

import torch
from torch import nn

from zeroamp.float8.chosen_weights import computes_as_linear, is_of_torchao, with_float8
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
    """Lets FSDP2 all-gather weights of Linears in float8. Also made for a model that torchao converted."""

    data_axes_only = KEY

    def __init__(self) -> None:
        self._mm_configs: dict[str, Any] = {}

    def check_config(self, policy: Policy) -> None:
        """Raise ConfigError for what the key may not be combined with."""
        check_float8(policy)

    def precisions(
        self, model: nn.Module, policy: Policy, uses: Sequence[ParameterUses], precisions: Iterable[Precision]
    ) -> Iterator[Precision]:
        """Yield the precisions, with those of the parameters that are all-gathered in float8 changed."""
        return with_float8(model, policy, uses, precisions)

    def check_model(self, model: nn.Module, plan: Plan) -> None:
        """Raise if torchao is missing, or for `REFUSALS`."""
        check_float8_model(model, plan)

    def before_sharding(self, model: nn.Module, plan: Plan) -> None:
        """Replace the weights that torchao converted by plain parameters."""
        self._mm_configs = use_plain_weights(model, plan)

    def attach(self, model: nn.Module, state: WrapState) -> None:
        """Extend the all-gathers of the weights."""
        attach_float8(model, state, self._mm_configs)

    def add_traffic(self, plan: Plan, ranks: Ranks, traffic: Traffic) -> None:
        """Add the all-reduce of the scales, one fp32 number per weight."""
        del ranks
        key = TrafficKey("all_reduce", torch.float32, SCALES)
        traffic.calls[key] += 1
        traffic.num_bytes[key] += len(float8_params(plan)) * torch.float32.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Something about a model that float8 all-gathers are not built for."""

    name: str
    why: str
    """What would go wrong."""
    instead: str
    find: Callable[[nn.Module, Plan], str | None]
    """Returns the FQN of the first module or parameter that is so."""


def float8_params(plan: Plan) -> list[ParamPlan]:
    """Return the parameters of a plan that are all-gathered in float8."""
    return [param for param in plan.params if param.dtypes.param in FLOAT8_BY_NAME.values()]


def check_float8_model(model: nn.Module, plan: Plan) -> None:
    """Raise if the weights that are planned in float8 cannot be all-gathered in it.

    Raises:
        ConfigError: torchao is not installed, or is too old.
        WrapError: see `REFUSALS`.
    """
    _check_torchao()
    for refusal in REFUSALS:
        if (fqn := refusal.find(model, plan)) is not None:
            raise WrapError(f"{KEY} is not supported with {refusal.name} ({fqn}): {refusal.why}. {refusal.instead}")


def _check_torchao() -> None:
    least, install = ".".join(map(str, LEAST_TORCHAO)), "Install it: pip install 'zeroamp[float8]'. Or remove the key."
    try:
        version = metadata.version("torchao")
    except metadata.PackageNotFoundError:
        raise ConfigError(f"{KEY} needs torchao {least} or newer, which is not installed. {install}") from None
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < LEAST_TORCHAO:
        raise ConfigError(f"{KEY} needs torchao {least} or newer, but {version} is installed. {install}")


def _first_module(applies: Callable[[nn.Module], bool]) -> Callable[[nn.Module, Plan], str | None]:
    return lambda model, _plan: next((fqn or "the root" for fqn, each in model.named_modules() if applies(each)), None)


def _first_parameter(applies: Callable[[Any], bool]) -> Callable[[nn.Module, Plan], str | None]:
    return lambda model, _plan: next((fqn for fqn, each in model.named_parameters() if applies(each)), None)


def _first_converted(applies: Callable[[Any], bool]) -> Callable[[nn.Module, Plan], str | None]:
    return _first_parameter(lambda parameter: is_of_torchao(parameter) and applies(parameter))


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        name="adapters of peft",
        why="the frozen base is all-gathered as it is stored, so only the adapters would be rounded",
        instead="Remove the key.",
        find=_first_module(lambda module: any(cls.__module__.startswith("peft.") for cls in type(module).__mro__)),
    ),
    Refusal(
        name="quantized parameters",
        why="they are all-gathered as they are stored",
        instead="Remove the key.",
        find=_first_parameter(lambda parameter: hasattr(parameter, "quant_state") or not parameter.is_floating_point()),
    ),
    Refusal(
        name="torchao's weights of another dtype than float8_e4m3fn",
        why="all weights of a model are all-gathered in the dtype that the key names",
        instead="Convert the model with CastConfig(target_dtype=torch.float8_e4m3fn) for the weight.",
        find=_first_converted(lambda weight: weight._dtype != torch.float8_e4m3fn),
    ),
)
"""All that is not built, in the order in which it is looked for."""


def use_plain_weights(model: nn.Module, plan: Plan) -> dict[str, Any]:
    """Replace the weights that the caller converted by torchao by plain parameters of the same memory.

    Call before the model is sharded: shards are then plain in optimizers, checkpoints and exports.

    Returns:
        FQN -> torchao's `LinearMMConfig` of each weight that was replaced.
    """
    mm_configs: dict[str, Any] = {}
    for param in float8_params(plan):
        weight: Any = model.get_parameter(param.fqn)
        if is_of_torchao(weight):
            mm_configs[param.fqn] = weight._linear_mm_config
            (inner, *_), _ = weight.__tensor_flatten__()
            plain = nn.Parameter(getattr(weight, inner).detach(), requires_grad=weight.requires_grad)
            for fqn in (param.fqn, *param.aliases):
                owner, _, name = fqn.rpartition(".")
                setattr(model.get_submodule(owner), name, plain)
    return mm_configs


def attach_float8(model: nn.Module, state: WrapState, mm_configs: dict[str, Any]) -> None:
    """Extend the all-gathers of the planned weights of a sharded model, and let their Linears divide by the scales.

    `mm_configs` is what `use_plain_weights` returned.
    """
    from zeroamp.float8.scaled_weights import Float8Scales, Float8Weight, float8_forward  # they need torchao

    params = float8_params(state.plan)
    shards = list(shards_of(model, [param.fqn for param in params]))
    are_plain = [param.fqn not in mm_configs for param in params]
    process_group = state.mesh.get_group(state.mesh.ndim - 1)
    runs_forward = partial(lambda forward: forward.depth > 0, state.root_forward)
    scales = Float8Scales(shards, are_plain, process_group, state.listeners, runs_forward)
    for index, (param, shard) in enumerate(zip(params, shards, strict=True)):
        converted = {"mm_config": mm_configs[param.fqn]} if param.fqn in mm_configs else {}
        shard.extend(Float8Weight(shard=shard, scale=partial(scales.of, index), **converted))

    def before_forward(call: ForwardCall) -> AbstractContextManager[None] | None:
        if call.is_outermost:
            scales.prepare(may_differ=not state.step.is_open)
        return None

    state.root_forward.add("before unshard", before_forward)
    for fqn in dict.fromkeys(fqn for param in params for fqn in param.owner_fqns):
        linear = model.get_submodule(fqn)
        if computes_as_linear(linear):  # torchao's own computes with float8 weights
            wrap_forward(linear, float8_forward(cast(nn.Linear, linear), state.mesh.device_type))

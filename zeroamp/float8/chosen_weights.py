"""Which parameters `zeroamp.param_gather_dtype` all-gathers in float8. Pure; imports nothing of torchao.

These are the weights of Linears that would be all-gathered in the mode's low precision, if an `nn.Linear` is all that
reads them: not where a class computes with the weight itself, or an override names a dtype for it. If the caller
converted weights by torchao's `convert_to_float8_training` for float8 all-gathers, these weights and no others.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from zeroamp.float8.conflicts import KEY
from zeroamp.planning.parameter_uses import ParameterUses
from zeroamp.planning.safe_parameters import Compute, Precision
from zeroamp.policies.dtypes import short_name, stored_dtype
from zeroamp.policies.errors import ConfigError, WrapError
from zeroamp.policies.policy import Policy


def with_float8(
    model: nn.Module,
    policy: Policy,
    uses: Sequence[ParameterUses],
    precisions: Iterable[Precision],
) -> Iterator[Precision]:
    """Yield the precisions, with those of the parameters that are all-gathered in float8 changed.

    Raises:
        ConfigError: the policy asks for float8, but no parameter can be all-gathered in it.
        WrapError: the model has torchao's float8 weights, and the policy does not all-gather them in float8.
    """
    found, is_converted = False, any(is_of_torchao(use.parameter) for use in uses)
    for use, precision in zip(uses, precisions, strict=True):
        if is_of_torchao(use.parameter):
            _refuse_converted(use, policy, precision)
        is_left_out = is_converted and not is_of_torchao(use.parameter)  # torchao's module_filter_fn chose
        if policy.param_gather_dtype is None or is_left_out or not _is_chosen(use, precision):
            yield precision
            continue
        found = True
        compute: Compute = "as param" if is_of_torchao(use.parameter) else precision.compute
        yield replace(
            precision,
            param=policy.param_gather_dtype,
            compute=compute,
            reason=f"{precision.reason}; Linear weight: {KEY}",
        )
    if policy.param_gather_dtype is not None and not found:
        raise ConfigError(
            f'{KEY} is "{short_name(policy.param_gather_dtype)}", but {type(model).__name__} has no Linear whose fp32 '
            "weight would be all-gathered in bf16. Remove the key."
        )


def is_of_torchao(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is what torchao's conversion for float8 all-gathers makes of a weight."""
    cls = type(parameter)
    return cls.__name__ == "WeightWithDynamicFloat8CastTensor" and cls.__module__.startswith("torchao.")


def computes_as_linear(module: nn.Module) -> bool:
    """Return whether a module reads its weight by `nn.Linear.forward` alone.

    `nn.MultiheadAttention` reads the weight of its output projection itself, and does not call that Linear.
    """
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)  # the caller's own: an adapter, a kernel, a hook of accelerate
        and not isinstance(module, NonDynamicallyQuantizableLinear)
    )


def _is_chosen(use: ParameterUses, precision: Precision) -> bool:
    if not precision.is_low or stored_dtype(use.parameter) != torch.float32:
        return False
    if precision.is_overridden:
        return is_of_torchao(use.parameter)
    owners = use.named_owners()
    return is_of_torchao(use.parameter) or all(name == "weight" and computes_as_linear(owner) for owner, name in owners)


def _refuse_converted(use: ParameterUses, policy: Policy, precision: Precision) -> None:
    fqn, weight = use.fqns[0], f"is a {type(use.parameter).__name__} of torchao"
    if policy.param_gather_dtype is None:
        raise WrapError(
            f'{fqn} {weight}, which is all-gathered in float8. Set {KEY} to "float8_e4m3fn", or convert the model with '
            "enable_fsdp_float8_all_gather=False."
        )
    if policy.mode == "autocast":
        raise WrapError(
            f"{fqn} {weight}, whose Float8Linear reads the autocast of GPUs only, so that on a CPU it would compute in "
            f"fp32. Use bf16 instead of torch_autocast, or leave the conversion out: {KEY} all-gathers plain Linears "
            "in float8."
        )
    if not precision.is_low:
        raise WrapError(
            f"{fqn} {weight}, but is kept in fp32 ({precision.reason}). Leave its module out of the conversion by "
            "module_filter_fn."
        )

"""Which parameters `zeroamp.param_gather_dtype` all-gathers in float8. Pure; imports nothing of torchao.

These are the weights of Linears that would be all-gathered in the mode's low precision, if an `nn.Linear` is all that
reads them: not where a class computes with the weight itself, or an override names a dtype for it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from zeroamp.float8.conflicts import KEY
from zeroamp.planning.parameter_uses import ParameterUses
from zeroamp.planning.safe_parameters import Precision
from zeroamp.policies.dtypes import short_name, stored_dtype
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.policy import Policy


def with_float8(
    model: nn.Module,
    policy: Policy,
    uses: Sequence[ParameterUses],
    precisions: Iterable[Precision],
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
            f'{KEY} is "{short_name(policy.param_gather_dtype)}", but {type(model).__name__} has no Linear whose fp32 '
            "weight would be all-gathered in bf16. Remove the key."
        )


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
    is_low = precision.is_low and stored_dtype(use.parameter) == torch.float32 and not precision.is_overridden
    return is_low and all(name == "weight" and computes_as_linear(owner) for owner, name in use.named_owners())

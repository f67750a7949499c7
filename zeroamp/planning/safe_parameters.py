"""Which parameters are all-gathered and computed in low precision, and why. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from zeroamp.planning.discover import discover_safe_parameters
from zeroamp.planning.example_inputs import example_arguments
from zeroamp.planning.fp32_regions import KEY as FP32_KEY
from zeroamp.planning.fp32_regions import Fp32Regions
from zeroamp.planning.mesh import current_device_type
from zeroamp.planning.parameter_uses import ParameterUses
from zeroamp.policies.dtypes import short_name, stored_dtype
from zeroamp.policies.errors import ConfigError, describe
from zeroamp.policies.policy import Policy
from zeroamp.policies.safe_modules import DEFAULT_SAFE_MODULES, KEY, resolve_safe_classes, unsafe_owner

Compute = Literal["low", "per op", "fp32", "as stored"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Whether one parameter is in low precision, and why."""

    is_low: bool
    """Whether it is all-gathered in the mode's low precision, if it is stored in fp32."""
    compute: Compute
    """ "low": in the mode's low precision; "per op": `torch.autocast` decides; "fp32": in a region kept in fp32; "as
    stored": nothing casts it."""
    reason: str


def param_precisions(
    model: nn.Module,
    policy: Policy,
    uses: Sequence[ParameterUses],
    regions: Fp32Regions,
    example_inputs: Any = None,
    device_type: str | None = None,
) -> Iterator[Precision]:
    """Yield the precision of each parameter. The last two arguments are for `lower_precision_safe_modules` "auto".

    Raises:
        ConfigError: a safe module class is unknown or owns no parameter, the run for "auto" cannot be traced or finds
            nothing safe, or a pattern of `keep_in_fp32_modules` cuts through a tied parameter or keeps one that is
            stored in less than fp32.
    """
    if policy.mode != "autocast":
        is_low = policy.mode != "fp32"
        of_mode = Precision(is_low=is_low, compute="low" if is_low else "as stored", reason=f"mode {policy.mode}")
        defaults = [of_mode] * len(uses)
    elif policy.lower_precision_safe_modules == "auto":
        defaults = _by_traced_run(model, policy, uses, example_inputs, device_type)
    else:
        defaults = _by_class(model, policy.lower_precision_safe_modules, uses)
    for use, default in zip(uses, defaults, strict=True):
        dtype = stored_dtype(use.parameter)
        if not dtype.is_floating_point:
            reason = f"{short_name(dtype)} is no floating-point dtype"
            yield Precision(is_low=False, compute="as stored", reason=reason)
        elif hasattr(use.parameter, "quant_state"):  # of bitsandbytes: packed words, in any dtype
            yield Precision(is_low=False, compute="as stored", reason="quantized: its bits are no numbers")
        elif use.parameter.dim() == 0:
            yield Precision(is_low=False, compute="per op", reason="0-D: each rank holds it whole, in fp32")
        else:
            yield _in_fp32(use, regions, policy) or default


def _in_fp32(use: ParameterUses, regions: Fp32Regions, policy: Policy) -> Precision | None:
    """Return the precision of a parameter that `keep_in_fp32_modules` matches, or None if no pattern does."""
    patterns = [regions.pattern_of(fqn) for fqn in use.fqns]
    if not any(patterns):
        return None
    kept, pattern = next((fqn, each) for fqn, each in zip(use.fqns, patterns, strict=True) if each is not None)
    if policy.mode != "autocast" and not all(patterns):
        outside = use.fqns[patterns.index(None)]
        raise ConfigError(
            f"{FP32_KEY}: {pattern!r} keeps {kept} in fp32 but not {outside}, which is the same parameter. In "
            f"mode {policy.mode} each parameter has one dtype: name all owners of a tied parameter, or none."
        )
    if stored_dtype(use.parameter).itemsize < torch.float32.itemsize:
        raise ConfigError(
            f"{FP32_KEY}: {pattern!r} keeps {kept} in fp32, but it is stored in "
            f"{short_name(use.parameter.dtype)}. Call .float() on its module before wrap_model."
        )
    is_named_itself = use.fqns[0] in regions.tensors
    own: Compute = "per op" if policy.mode == "autocast" else "as stored"
    return Precision(
        is_low=False,
        compute=own if is_named_itself or not all(patterns) else "fp32",
        reason=f"kept in fp32: {FP32_KEY} {pattern!r}",
    )


def _by_traced_run(
    model: nn.Module,
    policy: Policy,
    uses: Sequence[ParameterUses],
    example_inputs: Any,
    device_type: str | None,
) -> list[Precision]:
    if policy.low_dtype is None:
        raise AssertionError(f"expected a low dtype in mode {policy.mode}, got None")
    args, kwargs = example_arguments(model, example_inputs)
    found = discover_safe_parameters(model, args, kwargs, policy.low_dtype, device_type or current_device_type())
    classes = resolve_safe_classes(DEFAULT_SAFE_MODULES, model)
    precisions = []
    for use in uses:
        name = use.fqns[0]
        is_low = name in found.safe
        would_be_low = unsafe_owner(use.named_owners(), classes) is None
        otherwise = "all-gather it in low precision" if would_be_low else "keep it in fp32"
        wrong = f"; the default class list would {otherwise}" if is_low != would_be_low else ""
        reason = f"{found.reasons[name]}{wrong}"
        precisions.append(Precision(is_low=is_low, compute="low" if is_low else "per op", reason=reason))
    if not any(precision.is_low for precision in precisions):
        why = f"{uses[0].fqns[0]} is {precisions[0].reason}." if precisions else "The model has no parameters."
        raise ConfigError(
            f'{KEY} "auto" needs a model with layers that autocast runs in low precision, but finds no parameter of '
            f"{type(model).__name__} that autocast only casts. {why}"
        )
    return precisions


def _by_class(model: nn.Module, names: Sequence[str], uses: Sequence[ParameterUses]) -> list[Precision]:
    classes = resolve_safe_classes(names, model)
    precisions = []
    for use in uses:
        culprit = unsafe_owner(use.named_owners(), classes)
        if culprit is None:
            reason = f"safe: owned by {type(next(iter(use.owners))).__name__}"
            precisions.append(Precision(is_low=True, compute="low", reason=reason))
            continue
        tied = f", tied with {', '.join(use.fqns[1:])}" if len(use.owners) > 1 else ""
        reason = f"not safe: owned by {type(culprit).__name__} ({use.owners[culprit] or 'the root'}){tied}"
        precisions.append(Precision(is_low=False, compute="per op", reason=reason))
    if classes and not any(precision.is_low for precision in precisions):
        raise ConfigError(
            describe(
                KEY,
                f"{', '.join(names)}, which own no parameter of {type(model).__name__}",
                "classes of the model's large layers",
                "All parameters would stay fp32: name other classes, or switch torch_autocast off.",
            )
        )
    return precisions

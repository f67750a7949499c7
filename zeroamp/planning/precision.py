"""Which parameters travel and compute in low precision, and why. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from zeroamp.planning.discover import discover_safe_parameters
from zeroamp.planning.example_inputs import example_arguments
from zeroamp.planning.fp32_regions import KEY as FP32_KEY
from zeroamp.planning.fp32_regions import Fp32Regions
from zeroamp.planning.mesh import current_device_type
from zeroamp.planning.ownership import ParameterUses
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import ConfigError, describe
from zeroamp.policies.policy import Policy
from zeroamp.policies.safe_modules import DEFAULT_SAFE_MODULES, KEY, resolve_safe_classes, unsafe_owner

Compute = Literal["low", "per op", "fp32", "as stored"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What becomes of one parameter."""

    is_low: bool
    """Whether it is gathered in the mode's low precision, if it is stored in fp32."""
    compute: Compute
    """ "low": in the mode's low precision; "per op": `torch.autocast` decides; "fp32": in a region kept in fp32; "as
    stored": nothing casts it."""
    reason: str


def judge(
    model: nn.Module,
    policy: Policy,
    uses: Sequence[ParameterUses],
    regions: Fp32Regions,
    example_inputs: Any = None,
    device_type: str | None = None,
) -> list[Verdict]:
    """Decide for every use. The last two are for `lower_precision_safe_modules` "auto": what the traced run gets.

    Raises:
        ConfigError: a safe module class is unknown or owns no parameter, the run for "auto" cannot be traced or finds
            nothing safe, or a pattern of `keep_in_fp32_modules` cuts through a tied parameter or keeps one that is
            stored in less than fp32.
    """
    of_autocast: list[Verdict] = []
    if policy.mode == "autocast":
        names = policy.lower_precision_safe_modules
        of_autocast = (
            _judge_by_run(model, policy, uses, example_inputs, device_type)
            if names == "auto"
            else _judge_by_class(model, names, uses)
        )
    verdicts = []
    for index, use in enumerate(uses):
        if not use.parameter.dtype.is_floating_point:
            reason = f"{short_name(use.parameter.dtype)} is no floating-point dtype"
            verdicts.append(Verdict(is_low=False, compute="as stored", reason=reason))
        elif kept := _kept(use, regions, policy):
            verdicts.append(kept)
        elif of_autocast:
            verdicts.append(of_autocast[index])
        else:
            is_low = policy.mode != "fp32"
            compute: Compute = "low" if is_low else "as stored"
            verdicts.append(Verdict(is_low=is_low, compute=compute, reason=f"mode {policy.mode}"))
    return verdicts


def _kept(use: ParameterUses, regions: Fp32Regions, policy: Policy) -> Verdict | None:
    """Return the verdict on a parameter that is kept in fp32, or None if it is not."""
    patterns = [regions.pattern_of(fqn) for fqn in use.fqns]
    if not any(patterns):
        return None
    pattern = next(filter(None, patterns))
    if policy.mode != "autocast" and not all(patterns):
        outside = use.fqns[patterns.index(None)]
        raise ConfigError(
            describe(
                FP32_KEY,
                f"{pattern!r}, which keeps {use.fqns[0]} in fp32 but not {outside}, the same parameter",
                "patterns that match all owners of a tied parameter, or none",
                f"In mode {policy.mode} each parameter has one dtype: name the other owner too.",
            )
        )
    if use.parameter.dtype.itemsize < torch.float32.itemsize:
        raise ConfigError(
            describe(
                FP32_KEY,
                f"{pattern!r}, which keeps {use.fqns[0]} in fp32, a parameter stored in "
                f"{short_name(use.parameter.dtype)}",
                "parameters stored in fp32",
                "Call .float() on its module before wrap_model.",
            )
        )
    is_named_itself = use.fqns[0] in regions.tensors
    own: Compute = "per op" if policy.mode == "autocast" else "as stored"
    return Verdict(
        is_low=False,
        compute=own if is_named_itself or not all(patterns) else "fp32",
        reason=f"kept in fp32: {FP32_KEY} {pattern!r}",
    )


def _judge_by_run(
    model: nn.Module,
    policy: Policy,
    uses: Sequence[ParameterUses],
    example_inputs: Any,
    device_type: str | None,
) -> list[Verdict]:
    if policy.low_dtype is None:
        raise AssertionError(f"expected a low dtype in mode {policy.mode}, got None")
    args, kwargs = example_arguments(model, example_inputs)
    found = discover_safe_parameters(model, args, kwargs, policy.low_dtype, device_type or current_device_type())
    classes = resolve_safe_classes(DEFAULT_SAFE_MODULES, model)
    verdicts = []
    for use in uses:
        name = use.fqns[0]
        is_low = name in found.safe
        would_be_low = unsafe_owner(use.named_owners(), classes) is None
        otherwise = "gather it low" if would_be_low else "keep it in fp32"
        wrong = f"; the default class list would {otherwise}" if is_low != would_be_low else ""
        reason = f"{found.reasons[name]}{wrong}"
        verdicts.append(Verdict(is_low=is_low, compute="low" if is_low else "per op", reason=reason))
    if not any(verdict.is_low for verdict in verdicts):
        found_words = f'"auto", which finds no parameter of {type(model).__name__} that autocast only casts'
        remedy = f"Of the first it says: {verdicts[0].reason}." if verdicts else "It has no parameters."
        raise ConfigError(describe(KEY, found_words, "a model with layers that autocast runs in low precision", remedy))
    return verdicts


def _judge_by_class(model: nn.Module, names: Sequence[str], uses: Sequence[ParameterUses]) -> list[Verdict]:
    classes = resolve_safe_classes(names, model)
    verdicts = []
    for use in uses:
        culprit = unsafe_owner(use.named_owners(), classes)
        if culprit is None:
            reason = f"safe: owned by {type(next(iter(use.owners))).__name__}"
            verdicts.append(Verdict(is_low=True, compute="low", reason=reason))
            continue
        tied = f", tied with {', '.join(use.fqns[1:])}" if len(use.owners) > 1 else ""
        reason = f"not safe: owned by {type(culprit).__name__} ({use.owners[culprit] or 'the root'}){tied}"
        verdicts.append(Verdict(is_low=False, compute="per op", reason=reason))
    if classes and not any(verdict.is_low for verdict in verdicts):
        raise ConfigError(
            describe(
                KEY,
                f"{', '.join(names)}, which own no parameter of {type(model).__name__}",
                "classes that the model contains",
                "Name the classes of its large layers, or switch torch_autocast off: as it is, all would stay fp32.",
            )
        )
    return verdicts

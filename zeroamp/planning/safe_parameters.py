"""Decides which parameters are all-gathered and computed in low precision, and records the reasons."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zeroamp.planning.parameter_uses import ParameterUses
from zeroamp.planning.precisions import PlanExtension, Precision
from zeroamp.policies.dtypes import short_name, stored_dtype
from zeroamp.policies.errors import ConfigError, describe
from zeroamp.policies.policy import Policy
from zeroamp.policies.safe_modules import KEY, resolve_safe_classes, unsafe_owner


def param_precisions(
    model: nn.Module,
    policy: Policy,
    uses: Sequence[ParameterUses],
    extensions: Iterable[PlanExtension],
    example_inputs: Any,
    device_type: str | None,
) -> Iterator[Precision]:
    """Yield the precision of each parameter of `uses`, in their order, before extensions change some.

    The arguments are those of `build_plan`.

    Raises:
        ConfigError: a safe module class is unknown or owns no parameter, or an extension cannot decide.
    """
    defaults = _by_mode(model, policy, uses, extensions, example_inputs, device_type)
    for use, default in zip(uses, defaults, strict=True):
        yield fixed_precision(use.parameter) or default


def fixed_precision(parameter: torch.Tensor) -> Precision | None:
    """Return the precision of a parameter that has one in every mode; None for the others."""
    dtype = stored_dtype(parameter)
    if not dtype.is_floating_point:
        reason = f"{short_name(dtype)} is not a floating-point dtype"
        return Precision(is_low=False, compute="as stored", reason=reason)
    if hasattr(parameter, "quant_state"):  # of bitsandbytes: packed words, in any dtype
        return Precision(is_low=False, compute="as stored", reason="quantized: it stores packed bits")
    if parameter.dim() == 0:
        return Precision(is_low=False, compute="per op", reason="0-D: whole on each rank, in fp32")
    return None


def _by_mode(
    model: nn.Module,
    policy: Policy,
    uses: Sequence[ParameterUses],
    extensions: Iterable[PlanExtension],
    example_inputs: Any,
    device_type: str | None,
) -> Sequence[Precision]:
    """Return the precisions by the mode. In mode "autocast" the classes of the owners decide, or an extension."""
    if policy.mode != "autocast":
        is_low = policy.mode != "fp32"
        of_mode = Precision(is_low=is_low, compute="low" if is_low else "as stored", reason=f"mode {policy.mode}")
        return [of_mode] * len(uses)
    for extension in extensions:
        found = extension.safe_precisions(model, policy, uses, example_inputs, device_type)
        if found is not None:
            return found
    names = policy.lower_precision_safe_modules
    precisions = by_class(model, names, uses)
    refuse_none_safe(model, names, uses, precisions)
    return precisions


def by_class(model: nn.Module, names: Sequence[str], uses: Sequence[ParameterUses]) -> list[Precision]:
    """Return the precisions by the classes of the owners. `names` are those of the safe classes."""
    classes, outside = resolve_safe_classes(names, model), _read_outside_op(model)
    precisions = []
    for use in uses:
        culprit = unsafe_owner(use.named_owners(), classes)
        if culprit is not None:
            tied = f", tied with {', '.join(use.fqns[1:])}" if len(use.owners) > 1 else ""
            reason = f"not safe: owned by {type(culprit).__name__} ({use.owners[culprit] or 'the root'}){tied}"
            precisions.append(Precision(is_low=False, compute="per op", reason=reason))
        elif why := next((outside[owner] for owner in use.owners if owner in outside), None):
            precisions.append(Precision(is_low=False, compute="per op", reason=f"not safe: {why}"))
        else:
            reason = f"safe: owned by {type(next(iter(use.owners))).__name__}"
            precisions.append(Precision(is_low=True, compute="low", reason=reason))
    return precisions


def refuse_none_safe(
    model: nn.Module, names: Sequence[str], uses: Sequence[ParameterUses], precisions: Iterable[Precision]
) -> None:
    """Raise ConfigError if no parameter is in low precision, because the classes `names` own none."""
    if not names or any(precision.is_low for precision in precisions):
        return
    refuse_all_ignored(model, uses)
    if not _own_parameters(model, resolve_safe_classes(names, model), uses):
        raise ConfigError(
            describe(
                KEY,
                f"{', '.join(names)}, which own no parameter of {type(model).__name__}",
                "classes of the model's large layers",
                "All parameters would stay fp32: name other classes, or switch torch_autocast off.",
            )
        )


def _read_outside_op(model: nn.Module) -> dict[nn.Module, str]:
    """Return {module: why its weight is not safe} for Linears and convolutions in peft's LoRA layers.

    Autocast casts a Linear's weight at its op only. Other code reads the weight, or its dtype, as it is stored. That
    code would compute other bits with a weight that is all-gathered in low precision. It is in these places:

    - peft casts the input of an adapter to the dtype of `lora_A.weight`, before the dropout.
    - Variants of LoRA (DoRA) compute with the weights themselves: the norm of each row of W + scale * B @ A.
    - LoRA of a parameter (`target_parameters`) adds B @ A to the parameter, and calls neither of its Linears.

    The traced run of "auto" finds these uses by itself. peft is not imported.
    """
    found: dict[nn.Module, str] = {}
    modules: dict[str, Any] = dict(model.named_modules())
    for fqn, layer in modules.items():
        if _is_lora(layer):
            for adapter, lora_a in layer.lora_A.items():
                if hasattr(layer, "parameter_name"):
                    why = f"peft ({fqn}) adds the product of both weights to {layer.parameter_name}"
                    found |= dict.fromkeys((lora_a, layer.lora_B[adapter]), why)
                elif adapter in getattr(layer, "lora_variant", {}):
                    kind = type(layer.lora_variant[adapter]).__name__
                    why = f"{kind} of peft ({fqn}) reads it outside of its op"
                    found |= dict.fromkeys((layer.get_base_layer(), lora_a, layer.lora_B[adapter]), why)
                elif not isinstance(layer.lora_dropout[adapter], nn.Identity):
                    found[lora_a] = f"peft ({fqn}) casts the input of its dropout to the dtype of this weight"
    return found


def _is_lora(module: nn.Module) -> bool:
    is_of_peft = any(cls.__module__.startswith("peft.") for cls in type(module).__mro__)
    return is_of_peft and all(hasattr(module, name) for name in ("lora_A", "lora_B", "lora_dropout", "get_base_layer"))


def refuse_all_ignored(model: nn.Module, uses: Sequence[ParameterUses]) -> None:
    """Raise ConfigError if `ignored_params` contains all parameters of a model."""
    if not uses and next(model.parameters(), None) is not None:
        raise ConfigError(
            f"ignored_params contains all parameters of {type(model).__name__}, so torch_autocast finds none to "
            "all-gather in low precision. Remove some from ignored_params, or switch torch_autocast off."
        )


def _own_parameters(model: nn.Module, classes: tuple[type[nn.Module], ...], uses: Sequence[ParameterUses]) -> bool:
    """Return whether modules of the safe classes own a parameter that has no unsafe owner, or that is ignored.

    A parameter that is read outside of its op counts too: see `_read_outside_op`.
    """
    owners = (module for module in model.modules() if isinstance(module, classes))
    owned = {id(parameter) for owner in owners for parameter in owner.parameters(recurse=False)}
    is_used_safely = any(unsafe_owner(use.named_owners(), classes) is None for use in uses)
    return is_used_safely or not owned <= {id(use.parameter) for use in uses}

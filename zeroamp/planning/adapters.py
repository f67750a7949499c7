"""Finds the weights that peft's LoRA layers read outside of the op that autocast casts. Does not import peft.

Autocast casts a Linear's weight at its op only. Other code reads the weight, or its dtype, as it is stored. That code
would compute other bits with a weight that is all-gathered in low precision. It is in these places:

- peft casts the input of an adapter to the dtype of `lora_A.weight`, before the dropout.
- Variants of LoRA (DoRA) compute with the weights themselves: the norm of each row of W + scale * B @ A.
- LoRA of a parameter (`target_parameters`) adds B @ A to the parameter, and calls neither of its Linears.

The traced run of `lower_precision_safe_modules` "auto" finds these uses without this module.
"""

from typing import Any

from torch import nn


def read_outside_op(model: nn.Module) -> dict[nn.Module, str]:
    """Return {module: why its weight is not safe} for Linears and convolutions in peft's LoRA layers."""
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

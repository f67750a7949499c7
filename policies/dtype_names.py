"""The names of dtypes, in configs and in reports. Does not import torch."""

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    import torch

NAME_IN_TORCH = {
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
}
"""Every spelling that DeepSpeed's `DtypeEnum` accepts, except int8, in which no mode computes -> torch's name."""

_SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def short_name(dtype: "torch.dtype") -> str:
    """Return "fp32", "bf16", "fp16" or "fp64", and for other dtypes torch's name without the prefix."""
    name = str(dtype).removeprefix("torch.")
    return _SHORT_NAMES.get(name, name)


def is_dtype(value: object) -> "TypeGuard[torch.dtype]":
    """Return whether `value` is a torch.dtype."""
    torch = sys.modules.get("torch")  # without the module there is no value of its types
    return isinstance(value, getattr(torch, "dtype", ()))

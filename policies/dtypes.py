"""The names that configs use for dtypes, and the short names that reports print."""

import torch

LOW_DTYPES = (torch.bfloat16, torch.float16)

DTYPE_BY_NAME = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
}
"""Every spelling that DeepSpeed's `DtypeEnum` accepts, but int8: no precision mode computes in it."""

_SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def short_name(dtype: torch.dtype) -> str:
    """Return "fp32", "bf16", "fp16" or "fp64", and for other dtypes torch's name without the prefix."""
    return _SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))

"""The names that configs use for dtypes, and the short names that reports print."""

import torch

LOW_DTYPES = (torch.bfloat16, torch.float16)
"""A trainable parameter in one of these gets fp32 master weights."""

INTEGER_BY_NUM_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integer dtype in which its bits are summed for a checksum."""

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
"""Every spelling that DeepSpeed's `DtypeEnum` accepts, except int8, in which no mode computes."""

FLOAT8_BY_NAME = {"float8_e4m3fn": torch.float8_e4m3fn}
"""The values of `zeroamp.param_gather_dtype`."""

_SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def stored_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of the sharded parameter: fp32 for a trainable one in bf16 or fp16, else the parameter's own.

    The fp32 shards are the master weights, which the optimizer updates.
    """
    return torch.float32 if parameter.requires_grad and parameter.dtype in LOW_DTYPES else parameter.dtype


def short_name(dtype: torch.dtype) -> str:
    """Return "fp32", "bf16", "fp16" or "fp64", and for other dtypes torch's name without the prefix."""
    return _SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))

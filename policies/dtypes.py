"""The dtypes that a config can name, their short names, and the dtype of sharded parameters."""

import torch

LOW_DTYPES = (torch.bfloat16, torch.float16)
"""A trainable parameter in one of these gets fp32 master weights."""

INTEGER_BY_NUM_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Bytes of an element -> the integer dtype in which its bits are summed for a checksum. 16 bytes are two integers."""

DTYPE_BY_NAME = {
    **dict.fromkeys(("fp32", "float32", "float"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half"), torch.float16),
}
"""Every spelling that DeepSpeed's `DtypeEnum` accepts, except int8, in which no mode computes -> the dtype."""

FLOAT8_BY_NAME = {"float8_e4m3fn": torch.float8_e4m3fn}
"""The values of `zeroamp.param_gather_dtype`."""

_SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def short_name(dtype: torch.dtype) -> str:
    """Return "fp32", "bf16", "fp16" or "fp64", and for other dtypes torch's name without the prefix."""
    name = str(dtype).removeprefix("torch.")
    return _SHORT_NAMES.get(name, name)


def stored_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of the sharded parameter: fp32 for a trainable one in bf16 or fp16, else the parameter's own.

    The fp32 shards are the master weights, which the optimizer updates.
    """
    return torch.float32 if parameter.requires_grad and parameter.dtype in LOW_DTYPES else parameter.dtype

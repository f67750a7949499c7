"""The dtypes that a config can name, and the dtype of sharded parameters."""

import torch

from zeroamp.policies.dtype_names import NAME_IN_TORCH

LOW_DTYPES = (torch.bfloat16, torch.float16)
"""A trainable parameter in one of these gets fp32 master weights."""

INTEGER_BY_NUM_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integer dtype in which its bits are summed for a checksum."""

DTYPE_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, in_torch) for name, in_torch in NAME_IN_TORCH.items()}
"""Dtype by each of its names in a config."""

FLOAT8_BY_NAME = {"float8_e4m3fn": torch.float8_e4m3fn}
"""The values of `zeroamp.param_gather_dtype`."""


def stored_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of the sharded parameter: fp32 for a trainable one in bf16 or fp16, else the parameter's own.

    The fp32 shards are the master weights, which the optimizer updates.
    """
    return torch.float32 if parameter.requires_grad and parameter.dtype in LOW_DTYPES else parameter.dtype

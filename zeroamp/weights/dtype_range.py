"""Finite values that a narrower dtype would turn into infinity: they are refused before they are written."""

import torch

from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import CheckpointError, describe


def overflow(tensor: torch.Tensor, dtype: torch.dtype) -> float | None:
    """Return the largest finite magnitude in `tensor` if `dtype` rounds it to infinity."""
    if dtype == tensor.dtype or torch.finfo(dtype).max >= torch.finfo(tensor.dtype).max or tensor.numel() == 0:
        return None
    largest = torch.stack(tensor.aminmax()).abs().max()
    if not largest.isfinite():
        finite = tensor[tensor.isfinite()]
        largest = finite.abs().max() if finite.numel() else largest.new_zeros(())
    return float(largest) if largest.to(dtype).isinf() else None


def refuse_overflows(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Raise CheckpointError if a finite value of a tensor would be infinite in `dtype`."""
    found = {name: overflow(tensor, dtype) for name, tensor in tensors.items()}
    refuse({name: largest for name, largest in found.items() if largest is not None}, dtype)


def refuse(overflows: dict[str, float], dtype: torch.dtype) -> None:
    """Raise CheckpointError unless `overflows`, magnitudes by parameter, is empty."""
    if not overflows:
        return
    name, largest = next(iter(overflows.items()))
    others = f", and {len(overflows) - 1} more parameters like it" if len(overflows) > 1 else ""
    limit = torch.finfo(dtype).max
    raise CheckpointError(
        describe(
            name,
            f"a value of magnitude {largest:g}{others}",
            f"at most {limit:g}, the largest number of {short_name(dtype)}",
            'Write another dtype: dtype="bf16" or dtype="fp32".' if dtype == torch.float16 else 'Write "fp32".',
        )
    )

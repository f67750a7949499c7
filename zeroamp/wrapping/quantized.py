"""Modules of bitsandbytes whose weights are sharded."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from zeroamp.wrapping.state import Removable

_PACKS = "support_avx512bf16_for_cpu"  # of bitsandbytes' Linear4bit


@dataclass(frozen=True, slots=True)
class _Changed:
    """An attribute of a module, and its value before."""

    module: Any
    before: object

    def remove(self) -> None:
        """Restore the value."""
        setattr(self.module, _PACKS, self.before)


def keep_packing(model: nn.Module) -> Iterator[Removable]:
    """Stop 4-bit layers from packing their weight in another layout; yield what undoes it.

    On CPUs with AVX512-BF16, the first forward in evaluation mode replaces the weight and changes `quant_state` in
    place. The next all-gather brings the first layout back, and `quant_state` would not fit it any more.
    """
    for module in model.modules():
        if before := getattr(module, _PACKS, False):
            setattr(module, _PACKS, False)
            yield _Changed(module, before)

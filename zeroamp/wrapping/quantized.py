"""Keeps the layout of bitsandbytes' 4-bit weights, which are sharded."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from zeroamp.wrapping.state import Removable

_PACKS = "support_avx512bf16_for_cpu"  # of bitsandbytes' Linear4bit


@dataclass(frozen=True, slots=True)
class _Changed:
    """An attribute of a module that was changed, with its old value."""

    module: Any
    before: object

    def remove(self) -> None:
        """Restore the old value."""
        setattr(self.module, _PACKS, self.before)


def keep_packing(model: nn.Module) -> Iterator[Removable]:
    """Stop 4-bit layers from packing their weight in another layout; yield objects whose `remove` undoes that.

    On CPUs with AVX512-BF16, the first forward in evaluation mode replaces the weight and changes `quant_state` in
    place. The next all-gather restores the weight's first layout, which `quant_state` then no longer fits.
    """
    for module in model.modules():
        if before := getattr(module, _PACKS, False):
            setattr(module, _PACKS, False)
            yield _Changed(module, before)

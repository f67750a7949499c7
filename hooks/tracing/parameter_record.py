"""Decides from the recorded uses of a parameter whether all-gathering it in a low dtype keeps all bits."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from zeroamp.policies.dtypes import short_name, stored_dtype
from zeroamp.policies.errors import some_of

Extent = tuple[int, tuple[int, ...], tuple[int, ...]]
"""(storage offset, size, strides): the elements of a parameter that a view contains."""


@dataclass(slots=True)
class ParameterRecord:
    """The uses of one parameter in one run."""

    parameter: torch.Tensor
    reads: list[str] = field(default_factory=list)
    """"op in module" for each op that reads the parameter's values and is not a cast to the low dtype."""
    casts: list[str] = field(default_factory=list)
    """The FQN of the module, for each cast to the low dtype."""
    cast_by: set[str] = field(default_factory=set)
    """Ops of `autocast_ops` for which the parameter was cast. "" stands for casts by torch's own autocast."""
    extents: list[Extent | None] = field(default_factory=list)
    """The elements of each cast that autograd differentiates; None for a cast of a copy."""
    recomputed_extents: list[Extent | None] = field(default_factory=list)
    """The same for casts in the backward, when checkpointed modules run again."""
    extents_without_grad: list[Extent | None] = field(default_factory=list)
    """The same for casts that autograd does not record: in `no_grad` or in a `torch.autograd.Function`."""
    gradients: list[bool] = field(default_factory=list)
    """For each gradient: whether its last op was a cast from the low dtype. Its values then fit into the low dtype."""
    dtype_read_in: str | None = None
    """The FQN of a module that read the parameter's dtype; None if no module did."""

    def safety(self, dtype: torch.dtype, *, with_backward: bool) -> tuple[bool, str]:
        """Return whether the run has the same bits if the parameter is all-gathered in `dtype`, and the reason.

        `with_backward`: whether the recorded run had a backward.
        """
        storage = stored_dtype(self.parameter)
        if storage == dtype:
            return True, f"safe: stored in {short_name(dtype)}"
        if not storage.is_floating_point:
            return False, f"not safe: {short_name(storage)} is not a floating-point dtype"
        if self.reads:
            return False, f"not safe: read in {short_name(storage)} by {some_of(self.reads, 1)}"
        if not self.casts:
            return False, "not safe: never used in the traced run"
        if self.parameter.requires_grad and not self._has_low_gradient(with_backward):
            low = short_name(dtype)
            return (
                False,
                f"not safe: cast to {low}{self._ops()} in {self._places()}, but its gradient has more bits than {low}",
            )
        return True, f"safe: cast to {short_name(dtype)}{self._ops()} in {self._places()}"

    @property
    def is_cast_by_ops_only(self) -> bool:
        """Whether all casts of the parameter were for ops of `autocast_ops`. False if there were none."""
        return bool(self.cast_by) and "" not in self.cast_by

    def _ops(self) -> str:
        named = sorted(self.cast_by - {""})
        return f" for {', '.join(named)}" if named else ""

    def _places(self) -> str:
        return ", ".join(dict.fromkeys(self.casts))

    def _has_low_gradient(self, with_backward: bool) -> bool:
        """Return whether the values of the gradient fit into the low dtype, so that a low gradient has the same bits.

        A single gradient whose last op was a cast from the low dtype fits. So does the sum of several gradients, one
        per cast, if the casts read elements that do not overlap: the sum then only adds zeros. For the second case
        autograd must have recorded every cast, at least when a checkpointed module ran again. Otherwise a backward
        written by hand may return any values.
        """
        if with_backward and len(self.gradients) <= 1 and all(self.gradients):
            return True
        new = [extent for extent in self.recomputed_extents if extent not in self.extents]
        if not Counter(self.extents_without_grad) <= Counter(new):
            return False
        # A recomputed module adds no gradients, except with `use_reentrant=True`, where it has its own backward.
        recomputed = new if len(self.gradients) <= 1 else self.recomputed_extents
        return are_disjoint(self.extents + recomputed, self.parameter)


def are_disjoint(extents: Sequence[Extent | None], parameter: torch.Tensor) -> bool:
    """Return whether no element of `parameter` is in two extents; False for unknown extents (None).

    Allocates one byte per element on the CPU.
    """
    known = [extent for extent in extents if extent is not None]
    if len(known) < len(extents):
        return False
    seen = torch.zeros(_num_stored(parameter), dtype=torch.bool, device="cpu")
    for offset, size, strides in known:
        seen.as_strided(size, strides, offset).fill_(True)
    return int(seen.count_nonzero()) == sum(prod(size) for _, size, _ in known)


def _num_stored(parameter: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(parameter.size(), parameter.stride(), strict=True))

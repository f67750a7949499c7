"""What one recorded run did with one parameter, and what follows for the dtype it may be gathered in."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from zeroamp.policies.dtypes import short_name, stored_dtype
from zeroamp.policies.errors import some_of

Extent = tuple[int, tuple[int, ...], tuple[int, ...]]
"""(storage offset, size, strides): which elements of a parameter a view shows."""


@dataclass(slots=True)
class ParameterRecord:
    """What one run did with one parameter."""

    parameter: torch.Tensor
    reads: list[str] = field(default_factory=list)
    """"op in module" for each use of its values that is no cast to the low dtype."""
    casts: list[str] = field(default_factory=list)
    """Module, for each cast to the low dtype."""
    cast_by: set[str] = field(default_factory=set)
    """The op of `autocast_ops` that each cast was for; "" for those that autocast makes by itself."""
    extents: list[Extent | None] = field(default_factory=list)
    """Which part each cast took that autograd differentiates; None where it took a copy."""
    recomputed_extents: list[Extent | None] = field(default_factory=list)
    """The same in the backward, where checkpointed modules run again."""
    extents_without_grad: list[Extent | None] = field(default_factory=list)
    """The same for casts that autograd does not see: in `no_grad`, in a `torch.autograd.Function`."""
    gradients: list[bool] = field(default_factory=list)
    """For each gradient that arrived: whether it was in the low dtype up to a last cast, as one gathered low is."""
    dtype_read_in: str | None = None
    """Module that asked for its dtype."""

    def safety(self, dtype: torch.dtype, *, with_backward: bool) -> tuple[bool, str]:
        """Return whether gathering the parameter in `dtype` leaves the run as it was, bit by bit, and why."""
        storage = stored_dtype(self.parameter)
        if storage == dtype:
            return True, f"safe: stored in {short_name(dtype)}"
        if not storage.is_floating_point:
            return False, f"not safe: {short_name(storage)} is no floating-point dtype"
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
        """Whether it is cast, and only for ops of `autocast_ops`."""
        return bool(self.cast_by) and "" not in self.cast_by

    def _ops(self) -> str:
        named = sorted(self.cast_by - {""})
        return f" for {', '.join(named)}" if named else ""

    def _places(self) -> str:
        return ", ".join(dict.fromkeys(self.casts))

    def _has_low_gradient(self, with_backward: bool) -> bool:
        """Whether the gradient has no more bits than the low dtype, so that computing it low computes the same.

        One gradient that a last cast widened has not. A sum of several, one per cast, has not either if the casts took
        parts that do not overlap, for then it only adds zeros. For that, autograd must have seen every cast, if only
        when a checkpointed module ran again: what a backward written by hand returns is anyone's guess.
        """
        if with_backward and len(self.gradients) <= 1 and all(self.gradients):
            return True
        new = [extent for extent in self.recomputed_extents if extent not in self.extents]
        if not Counter(self.extents_without_grad) <= Counter(new):
            return False
        # A module that runs again differentiates nothing new, but with `use_reentrant=True`: in a backward of its own.
        recomputed = new if len(self.gradients) <= 1 else self.recomputed_extents
        return are_disjoint(self.extents + recomputed, self.parameter)


def are_disjoint(extents: Sequence[Extent | None], parameter: torch.Tensor) -> bool:
    """Return whether no element is shown twice; marks one byte an element on the CPU."""
    known = [extent for extent in extents if extent is not None]
    if len(known) < len(extents):
        return False
    seen = torch.zeros(_num_stored(parameter), dtype=torch.bool, device="cpu")
    for offset, size, strides in known:
        seen.as_strided(size, strides, offset).fill_(True)
    return int(seen.count_nonzero()) == sum(prod(size) for _, size, _ in known)


def _num_stored(parameter: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(parameter.size(), parameter.stride(), strict=True))

"""`extra`, what the caller lets every rank save, when it is loaded."""

from collections.abc import Callable
from typing import Any

import torch

from zeroamp.policies.errors import CheckpointError, describe


def extra_of(rank: int, saved_by: int, read: Callable[[int], Any], where: str) -> Any:
    """Return what the chosen `rank` saved, of the `saved_by` ranks that did.

    Raises:
        CheckpointError: there was no such rank.
    """
    if not 0 <= rank < saved_by:
        raise CheckpointError(describe("extra_rank", rank, f"0 to {saved_by - 1}, the ranks of {where}", "Change it."))
    return read(rank)


def common_extra(num_ranks: int, saved_by: int, read: Callable[[int], Any], where: str) -> Any:
    """Return what all `saved_by` ranks saved alike, for `num_ranks` ranks that load it.

    Raises:
        CheckpointError: it was not the same.
    """
    first, *others = map(read, range(saved_by))
    if not all(_equal(first, other) for other in others):
        raise CheckpointError(
            describe(
                f"{where}, extra",
                f"values that differ between the {saved_by} ranks that saved it",
                f"the same on all, for {num_ranks} ranks",
                "Choose one with extra_rank, or save what does not depend on the rank.",
            )
        )
    return first


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)

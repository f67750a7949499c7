"""Compares the ranks before they train, by a digest in one collective, and raises an error that names what differs.

Ranks that differ would train wrongly without an error, or wait for each other for ever. So each rank makes a
`Description` of what must be equal on all ranks. If the ranks are equal, the comparison costs one all-reduce of two
integers.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from zeroamp.hooks.collectives.issued import issue
from zeroamp.hooks.collectives.traffic import IssuedCollective
from zeroamp.policies.errors import ZeroAmpError, error_text

T = TypeVar("T")
Description = Mapping[str, str]
"""Name -> value, which must be equal on all ranks and in the same order. Errors read "<name> is <value> on rank 0"."""

_NUM_NAMED = 4  # differences that an error names; others often follow from the first ones
_LONGEST = 160  # characters of a value in an error
_ERROR = "error"


def run_alike(
    action: Callable[[], tuple[T, Description]],
    *,
    what: str,
    remedy: str,
    error_type: type[ZeroAmpError],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> T:
    """Call `action` on every rank of `group`, compare the descriptions that it returns, and return its result.

    All ranks of the group call this.

    Args:
        action: returns a result and a description. May raise on some ranks. Must not communicate.
        what: the start of an error's text: the name of the function that compares.
        remedy: the end of an error's text: what to do.
        error_type: the class of the error.
        group: the ranks; None is the default group.
        device: of the tensors that `group` communicates.

    Raises:
        PeerError: another rank did not call this.
        Exception: the error of `action`, if it is the same on all ranks.
        ZeroAmpError: on all ranks, if `action` raised on some: the class that all errors have, else `error_type`.
        error_type: on all ranks, if the descriptions differ. The text names the differences and the ranks.
    """
    try:
        result, description = action()
    except Exception as error:
        if not _is_equal({_ERROR: error_text(error)}, what, group, device):
            _raise_errors(error, what, error_type, group)
        raise
    if not _is_equal(description, what, group, device):
        _raise_errors(None, what, error_type, group)
        raise error_type(f"{what} {differences(description, group)} {remedy}")
    return result


def _is_equal(description: Description, what: str, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    if dist.get_world_size(group) == 1:
        return True
    text = repr(list(description.items())).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7])  # fits int64, and so does its negative
    bounds = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    issued = IssuedCollective("all_reduce", bounds, what, group, dist.ReduceOp.MAX)
    # The maximum of -x is minus the minimum of x.
    issue(lambda: dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group), issued, ())
    return int(bounds[0]) == -int(bounds[1])


def differences(description: Description, group: dist.ProcessGroup | None) -> str:
    """Return a sentence that names the differences and their ranks. It is the same on all ranks. All ranks call this.

    Each rank compares its description with the first rank's, and sends only the differences.
    """
    ranks = dist.get_process_group_ranks(group)
    of_rank: list[_Differing | None] = [None] * len(ranks)
    try:
        box: list[Description | None] = [description if dist.get_rank() == ranks[0] else None]
        dist.broadcast_object_list(box, src=ranks[0], group=group)
        dist.all_gather_object(of_rank, _differing(box[0] or {}, description), group=group)
    except RuntimeError as error:
        return f"differs between ranks. The ranks could not exchange what differs: {str(error).strip()}."
    found = {rank: differing for rank, differing in zip(ranks, of_rank, strict=True) if differing is not None}
    return _sentence(found)


class _Differing(NamedTuple):
    """The differences between one rank and the first."""

    values: dict[str, tuple[str, str]]
    """Name -> (the first rank's value, this rank's value), for the first `_NUM_NAMED` differences."""
    num_differing: int
    """The number of all differences."""


def _differing(first: Description, own: Description) -> _Differing:
    by_length = sorted((first, own), key=len, reverse=True)  # so that names absent on one rank keep their place
    values = {
        key: (_shortened(first.get(key)), _shortened(own.get(key)))
        for key in dict.fromkeys((*by_length[0], *by_length[1]))
        if first.get(key) != own.get(key)
    }
    if not values:
        orders = zip(first, own, strict=True)
        values = {f"number {place} in the order": pair for place, pair in enumerate(orders, 1) if pair[0] != pair[1]}
    return _Differing(dict(list(values.items())[:_NUM_NAMED]), len(values))


def _sentence(found: Mapping[int, _Differing]) -> str:
    keys = list(dict.fromkeys(key for differing in found.values() for key in differing.values))[:_NUM_NAMED]
    parts = []
    for key in keys:
        of_first = next(differing.values[key][0] for differing in found.values() if key in differing.values)
        ranks_by_value: dict[str, list[int]] = {}
        for rank, differing in found.items():
            ranks_by_value.setdefault(differing.values.get(key, (of_first, of_first))[1], []).append(rank)
        values = [f"{value} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items()]
        parts.append(f"{key} is {values[0]}, but {' and '.join(values[1:])}")
    more = max(differing.num_differing for differing in found.values()) - len(keys)
    more_text = f"; and {more} more" if more > 0 else ""
    return f"differs between ranks: {'; '.join(parts) or 'the order of repeated calls'}{more_text}."


def _raise_errors(
    error: Exception | None, what: str, error_type: type[ZeroAmpError], group: dist.ProcessGroup | None
) -> None:
    """Raise the same error on all ranks if any rank has one. All ranks call this."""
    kind = type(error) if isinstance(error, ZeroAmpError) else error_type
    mine = None if error is None else (error_text(error), kind)
    ranks = dist.get_process_group_ranks(group)
    of_rank: list[tuple[str, type[ZeroAmpError]] | None] = [None] * len(ranks)
    dist.all_gather_object(of_rank, mine, group=group)
    ranks_by_text: dict[str, list[int]] = {}
    for rank, failed in zip(ranks, of_rank, strict=True):
        if failed is not None:
            ranks_by_text.setdefault(failed[0], []).append(rank)
    kinds = {failed[1] for failed in of_rank if failed is not None}
    if ranks_by_text:
        text = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items())
        raise (kinds.pop() if len(kinds) == 1 else error_type)(f"{what} failed on {text}") from error


def _shortened(value: str | None) -> str:
    if value is None:
        return "absent"
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"

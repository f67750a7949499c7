"""`run_alike`: runs an action on all ranks, compares its results, and raises an error of one rank on all of them.

A rank that raises alone leaves the others in a collective that never ends. `run_alike` compares the ranks while a model
is wrapped and a `TrainStep` is built, on the process group of training. `zeroamp/rank_group.py` runs the parts of
saves, loads and reports on a gloo group of its own.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from zeroamp.hooks.collectives.collective_calls import issue
from zeroamp.hooks.collectives.traffic import IssuedCollective
from zeroamp.policies.errors import ZeroAmpError, error_text

T = TypeVar("T")
Description = Mapping[str, str]
"""Name -> value, which must be equal on all ranks and in the same order. Errors read "<name> is <value> on rank 0"."""
Hyperparameters = list[list[tuple[str, object]]]
"""The plain values of each param group, which are read without waiting for the device. `repr` is equal on all ranks."""
PLAIN = (bool, int, float, str, type(None))
_NUM_NAMED = 4  # differences that an error names; others often follow from the first ones
_LONGEST = 160  # characters of a value in an error


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

    All ranks of the group call this. If the ranks are equal, the comparison costs one all-reduce of two integers.

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
    outcome, error = attempt(action)
    description = {"error": outcome.text or ""} if outcome.result is None else outcome.result[1]
    if not is_alike(description, what, group, device):
        ranks = dist.get_process_group_ranks(group)
        outcomes: list[Any] = [None] * len(ranks)
        dist.all_gather_object(outcomes, Outcome(None, outcome.text, outcome.error_type), group=group)
        raise_failure(outcomes, ranks, error_type, error, what=f"{what} failed on ")
        raise error_type(f"{what} {differences(description, group)} {remedy}")
    if outcome.result is None:
        raise error or AssertionError("expected a result or an error")
    return outcome.result[0]


def differences(description: Description, group: dist.ProcessGroup | None) -> str:
    """Return a sentence that names the differences and their ranks: the same on all ranks. All ranks call this."""
    ranks = dist.get_process_group_ranks(group)
    found: list[Any] = [None] * len(ranks)
    try:
        dist.all_gather_object(found, description, group=group)
    except RuntimeError as error:
        return f"differs between ranks. The ranks could not exchange what differs: {str(error).strip()}."
    longest = max(found, key=len)  # so that names absent on some ranks keep their place
    names = dict.fromkeys([*longest, *(name for each in found for name in each)])
    values = _unequal({name: [each.get(name) for each in found] for name in names})
    if not values:
        orders = enumerate(zip(*found, strict=True), 1)
        values = _unequal({f"number {place} in the order": keys for place, keys in orders})
    parts = []
    for name, of_ranks in list(values.items())[:_NUM_NAMED]:
        first, *others = [
            f"{_shortened(value)} on {_ranks(having)}" for value, having in _ranks_by_value(of_ranks, ranks).items()
        ]
        parts.append(f"{name} is {first}, but {' and '.join(others)}")
    more = f"; and {len(values) - _NUM_NAMED} more" if len(values) > _NUM_NAMED else ""
    return f"differs between ranks: {'; '.join(parts) or 'the order of repeated calls'}{more}."


def _unequal(values: Mapping[str, Sequence[str | None]]) -> dict[str, Sequence[str | None]]:
    return {name: of_ranks for name, of_ranks in values.items() if len(set(of_ranks)) > 1}


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """The outcome of an action on one rank: its result, or its error's text and, if a ZeroAmpError, its class."""

    result: T | None = None
    text: str | None = None
    error_type: type[ZeroAmpError] | None = None


def attempt(action: Callable[[], T]) -> tuple[Outcome[T], BaseException | None]:
    """Call `action` on this rank. Return its outcome, and the error that it raised, or None."""
    try:
        return Outcome(action()), None
    except Exception as raised:
        return Outcome(None, error_text(raised), type(raised) if isinstance(raised, ZeroAmpError) else None), raised


def raise_failure(
    outcomes: Sequence[Outcome[Any]],
    ranks: Sequence[int],
    error_type: type[ZeroAmpError],
    cause: BaseException | None,
    what: str = "",
) -> None:
    """Raise one error on all ranks, with the texts of the ranks that failed. Its class is the one that all errors have.

    If all ranks have the same error of zeroamp, each rank raises its own.
    """
    texts = _ranks_by_value(
        [outcome.text for outcome in outcomes if outcome.text is not None],
        [rank for rank, outcome in zip(ranks, outcomes, strict=True) if outcome.text is not None],
    )
    if not texts:
        return
    (common, *others) = {outcome.error_type for outcome in outcomes if outcome.text is not None}
    text = "; ".join(f"{_ranks(of_text)}: {text}" for text, of_text in texts.items())
    if list(texts.values()) == [list(ranks)]:
        if isinstance(cause, ZeroAmpError):
            raise cause
        text = next(iter(texts))
    raise (error_type if others or common is None else common)(f"{what}{text}") from cause


def describe_hyperparameters(hyperparameters: Hyperparameters) -> dict[str, str]:
    """Return what `hyperparameters_of` returned, by name."""
    return {
        f"{key} of param group {index}": str(value)
        for index, group in enumerate(hyperparameters)
        for key, value in group
    }


def is_alike(description: Description, what: str, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return whether all ranks of a group have the same description. `what`: who asks, in lists of calls."""
    return is_equal(_digest(repr(list(description.items())).encode()), what, group, device)


def is_equal(number: int, what: str, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return whether all ranks of a group have the same number, of 62 bits. `what`: who asks, in lists of calls."""
    if dist.get_world_size(group) == 1:
        return True
    bounds = torch.tensor([number, -number], dtype=torch.int64, device=device)
    issued = IssuedCollective("all_reduce", bounds, what, group, dist.ReduceOp.MAX)
    # The maximum of -x is minus the minimum of x.
    issue(lambda: dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group), issued, ())
    return int(bounds[0]) == -int(bounds[1])


def _digest(content: bytes) -> int:
    """Return a hash of 56 bits, so that the hash and its negative fit int64."""
    return int.from_bytes(hashlib.sha256(content).digest()[:7])


def _ranks_by_value(values: Sequence[T], ranks: Sequence[int]) -> dict[T, list[int]]:
    found: dict[T, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        found.setdefault(value, []).append(rank)
    return found


def _shortened(value: str | None) -> str:
    if value is None:
        return "absent"
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"

"""Runs actions on all ranks, compares their results, and raises an error of one rank on all of them.

A rank that raises alone leaves the others in a collective that never ends. `run_alike` compares the ranks while a model
is wrapped and a `TrainStep` is built, on the process group of training. `RankGroup` runs the parts of saves, loads and
reports on a gloo group of its own.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.hooks._torch.fsdp import timeout_of
from zeroamp.hooks._torch.process_groups import group_of_parts
from zeroamp.hooks.collectives.collective_calls import issue
from zeroamp.hooks.collectives.gloo_exit import pause_before_exit
from zeroamp.hooks.collectives.traffic import IssuedCollective
from zeroamp.policies.errors import CheckpointError, ZeroAmpError, error_text

T = TypeVar("T")
R = TypeVar("R")
Description = Mapping[str, str]
"""Name -> value, which must be equal on all ranks and in the same order. Errors read "<name> is <value> on rank 0"."""
Use = Literal["saving", "signals"]
"""What a group is for: saves and loads, or reports (RunReport, monitors, profile) and signals of the main thread."""
_NUM_NAMED = 4  # differences that an error names; others often follow from the first ones
_LONGEST = 160  # characters of a value in an error
_shared: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], RankGroup]]" = WeakKeyDictionary()


class RankGroup:
    """Runs actions on all ranks of a mesh, and exchanges their results on the CPU.

    Its gloo process group is separate from those of training, so that a background save does not mix with their
    collectives. The first exchange makes the group.
    """

    def __init__(self, mesh: DeviceMesh, use: Use = "saving") -> None:
        """Take the mesh, whose ranks form the group. Does not communicate."""
        self.ranks: tuple[int, ...] = tuple(sorted(mesh.mesh.flatten().tolist()))
        """Global ranks of the members, in increasing order."""
        self.rank = self.ranks.index(dist.get_rank())
        self.num_ranks = len(self.ranks)
        self._timeout = timeout_of(mesh.get_group(0), mesh.device_type)
        self._use = use
        self._group: dist.ProcessGroup | None = None
        self.background: Future[Any] | None = None
        """A background save whose thread uses the group, or None."""

    @classmethod
    def shared(cls, mesh: DeviceMesh, use: Use) -> "RankGroup":
        """Return the group of the mesh's ranks for a use. All models of the process share it.

        Each group costs connections and threads, which last until the program destroys its process groups.
        """
        world = dist.group.WORLD
        if world is None:
            raise AssertionError("expected the process group of a wrapped model")
        of_world = _shared.setdefault(world, {})
        key = use, tuple(sorted(mesh.mesh.flatten().tolist()))
        if key not in of_world:
            of_world[key] = cls(mesh, use)
        return of_world[key]

    @classmethod
    def for_saving(cls, mesh: DeviceMesh) -> "RankGroup":
        """Return the shared group for saving and loading. Waits until a background save has ended.

        If the background save failed, `Saving` raises its error. This method does not.
        """
        ranks = cls.shared(mesh, "saving")
        if ranks.background is not None:
            wait([ranks.background])
            ranks.background = None
        return ranks

    @classmethod
    def for_signals(cls, mesh: DeviceMesh) -> "RankGroup":
        """Return the shared group for flags and reports of the main thread. Background saves do not use it."""
        return cls.shared(mesh, "signals")

    def run(self, action: Callable[[], T]) -> list[T]:
        """Call `action` on every rank and return the results of all, in rank order.

        Raises:
            CheckpointError: on all ranks, if `action` raised on any, with the text of each error. On the remaining
                ranks, if a rank is lost.
            ZeroAmpError: on all ranks, if all errors have the same subclass: that subclass.
        """
        self._connect()  # before the action: a rank that is lost during the action is then noticed at once
        outcome, error = _attempt(action)
        outcomes = self._gather(outcome, error)
        _raise_failure(outcomes, self.ranks, CheckpointError, error)
        return [each.result for each in outcomes]  # type: ignore[misc]

    def on_first(self, action: Callable[[], T]) -> T:
        """Call `action` on the first rank only, and return its result on all. Raises as `run` does."""
        return self.run(lambda: action() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def reduce(self, action: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        """Call `action` on every rank, and `combine` with all results on the first. Return its result on all ranks.

        Raises as `run` does.
        """
        results = self.run(action)
        return self.on_first(lambda: combine(results))

    def any(self, value: bool) -> bool:
        """Return whether `value` is true on any rank. All ranks call this."""
        return any(self.run(lambda: value))

    def _connect(self) -> dist.ProcessGroup:
        if self._group is None:
            self._group = group_of_parts([self.ranks], self._timeout, "gloo")
            pause_before_exit()
        return self._group

    def _gather(self, outcome: "_Outcome[T]", error: BaseException | None) -> "list[_Outcome[T]]":
        outcomes: list[Any] = [None] * self.num_ranks
        try:
            dist.all_gather_object(outcomes, outcome, group=self._connect())
        except RuntimeError as lost:
            texts = [str(lost).strip()] if outcome.text is None else [outcome.text, str(lost).strip()]
            raise CheckpointError(
                f"An exchange between the {self.num_ranks} ranks for {self._use} failed on rank {dist.get_rank()}: "
                f"{'; '.join(texts)}. A rank is lost, or did not answer within the process group's "
                "timeout. Read the output of the other ranks, and restart from the last checkpoint."
            ) from error or lost
        return outcomes


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
    outcome, error = _attempt(action)
    description = {"error": outcome.text or ""} if outcome.result is None else outcome.result[1]
    if not _is_equal(description, what, group, device):
        ranks = dist.get_process_group_ranks(group)
        outcomes: list[Any] = [None] * len(ranks)
        dist.all_gather_object(outcomes, _Outcome(None, outcome.text, outcome.error_type), group=group)
        _raise_failure(outcomes, ranks, error_type, error, what=f"{what} failed on ")
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
class _Outcome(Generic[T]):
    """The outcome of an action on one rank: its result, or its error's text and, if a ZeroAmpError, its class."""

    result: T | None = None
    text: str | None = None
    error_type: type[ZeroAmpError] | None = None


def _attempt(action: Callable[[], T]) -> tuple[_Outcome[T], BaseException | None]:
    """Call `action` on this rank. Return its outcome, and the error that it raised, or None."""
    try:
        return _Outcome(action()), None
    except Exception as raised:
        return _Outcome(None, error_text(raised), type(raised) if isinstance(raised, ZeroAmpError) else None), raised


def _raise_failure(
    outcomes: Sequence[_Outcome[Any]],
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


def _is_equal(description: Description, what: str, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    if dist.get_world_size(group) == 1:
        return True
    digest = _digest(repr(list(description.items())).encode())
    bounds = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
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

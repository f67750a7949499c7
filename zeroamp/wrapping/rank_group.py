"""`RankGroup`: a process group of a model's ranks on the CPU, and errors of one rank that are raised on all of them.

A rank that raises alone leaves the others in a collective that never ends. `RankGroup.run` calls a function on every
rank, exchanges the outcomes, and raises on all ranks if it failed on any. Exchanges run along a `RankTree`.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.hooks._torch.fsdp import timeout_of
from zeroamp.hooks._torch.gloo import new_lazy_group
from zeroamp.hooks._torch.process_groups import axis_groups, equalise_numbers_along
from zeroamp.hooks.collectives.gloo_exit import pause_before_exit
from zeroamp.policies.errors import CheckpointError, ZeroAmpError, error_text
from zeroamp.wrapping.rank_tree import LostRankError, RankTree

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")
R = TypeVar("R")
Use = Literal["saving", "signals"]
_USES: dict[Use, str] = {
    "saving": "save or load",
    "signals": "agree on what is reported of the run (RunReport, monitors, profile) and on signals",
}
"""What ranks use such a group for, as text for errors: "ranks that ..."."""
_NO_VALUE = -(2**62)  # less than any digest or its negative
_shared: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], RankGroup]]" = WeakKeyDictionary()


class RankGroup:
    """Runs actions on all ranks of a mesh, and exchanges their results on the CPU.

    Its gloo process group is separate from those of training, so that a background save does not mix with their
    collectives. The first exchange makes the group. A rank connects only with its neighbours in a `RankTree`.
    """

    def __init__(self, mesh: DeviceMesh, use: Use = "saving") -> None:
        """Take the mesh, whose ranks form the group. Does not communicate."""
        self._ranks = sorted(mesh.mesh.flatten().tolist())
        self.ranks: tuple[int, ...] = tuple(self._ranks)
        """Global ranks of the members, in increasing order."""
        self._timeout = timeout_of(mesh.get_group(0), mesh.device_type)
        self.rank = self._ranks.index(dist.get_rank())
        self.num_ranks = len(self._ranks)
        self._is_local = self.num_ranks < dist.get_world_size()
        # Not the axes of a mesh of all ranks: the job's process group may be that of an axis. `_shared` would keep it.
        self._of_axes = list(axis_groups(mesh)) if self._is_local else []
        self._device_type = mesh.device_type
        self._use = use
        self._tree: RankTree | None = None
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

    @property
    def tree(self) -> RankTree:
        """The connections between the ranks. The first read makes the process group: all ranks must do it."""
        if self._tree is None:
            if self._is_local:
                equalise_numbers_along(self._of_axes, self._device_type)
            tree = RankTree(new_lazy_group(self._ranks, self._timeout, is_local=self._is_local))
            pause_before_exit()
            with self._naming_lost(_Outcome[None](), None):
                tree.max([])  # connects the ranks: from here on the loss of a rank is noticed at once
            self._tree = tree
        return self._tree

    def run(self, action: Callable[[], T]) -> list[T]:
        """Call `action` on every rank and return the results of all, in rank order.

        Ranks first compare digests of their results. Only results that differ are sent.

        Raises:
            CheckpointError: on all ranks, if `action` raised on any, with the text of each error. On the remaining
                ranks, if a rank is lost.
            ZeroAmpError: on all ranks, if all errors have the same subclass: that subclass.
        """
        tree = self.tree  # connected before the action: a rank that is lost during the action is then noticed
        outcome, error = _attempt(action)
        with self._naming_lost(outcome, error):
            is_failed, *largest = tree.max([outcome.text is not None, *_bounds(_digest(outcome.result))])
            if not is_failed and _is_equal(largest):
                return [outcome.result] * self.num_ranks  # type: ignore[list-item]
            outcomes: list[_Outcome[T]] = tree.all_gather(outcome)
        _raise(_failure(outcomes), error)
        return [each.result for each in outcomes]  # type: ignore[misc]

    def on_first(self, action: Callable[[], T]) -> T:
        """Call `action` on the first rank only, and return its result on all. Raises as `run` does."""
        tree = self.tree
        outcome, error = _attempt(action) if self.rank == 0 else (_Outcome[T](), None)
        with self._naming_lost(outcome, error):
            of_first: _Outcome[T] = tree.broadcast(outcome)
        _raise(_failure([of_first, *[_Outcome[T]()] * (self.num_ranks - 1)]), error)
        return of_first.result  # type: ignore[return-value]

    def reduce(self, action: Callable[[], T], combine: Callable[[list[T]], R]) -> R:
        """Call `action` on every rank, and `combine` with all results on the first. Return its result on all ranks.

        The results of `action` are sent to the first rank only. Raises as `run` does.
        """
        return self._reduce(action, lambda results: [combine(results)], self._broadcast_first)

    def reduce_scatter(self, action: Callable[[], T], combine: Callable[[list[T]], Sequence[R]]) -> R:
        """Call `action` on every rank, and `combine` with all results on the first. Return to each rank its own value.

        `combine` returns one value per rank, in rank order. Raises as `run` does.
        """
        return self._reduce(action, combine, self._scatter)

    def _scatter(self, replies: "list[_Reply[R]] | LostRankError") -> "_Reply[R]":
        reply: _Reply[R] = self.tree.scatter(replies)
        return reply

    def _broadcast_first(self, replies: "list[_Reply[R]] | LostRankError") -> "_Reply[R]":
        reply: _Reply[R] = self.tree.broadcast(replies[0] if isinstance(replies, list) and replies else replies)
        return reply

    def _reduce(
        self,
        action: Callable[[], T],
        combine: Callable[[list[T]], Sequence[R]],
        send: "Callable[[list[_Reply[R]] | LostRankError], _Reply[R]]",
    ) -> R:
        tree = self.tree
        outcome, error = _attempt(action)
        replies: list[_Reply[R]] | LostRankError = []
        with self._naming_lost(outcome, error):
            outcomes = tree.gather(outcome)
            if isinstance(outcomes, LostRankError):
                replies = outcomes
            elif outcomes:
                replies, raised = _combined(outcomes, combine)
                error = error or raised
            reply = send(replies)
        _raise(reply.failure, error)
        return reply.value  # type: ignore[return-value]

    @contextmanager
    def _naming_lost(self, outcome: "_Outcome[Any]", error: BaseException | None) -> Iterator[None]:
        try:
            yield
        except LostRankError as lost:
            texts = [str(lost)] if outcome.text is None else [outcome.text, str(lost)]
            raise CheckpointError(
                f"An exchange between the {self.num_ranks} ranks that {_USES[self._use]} failed on rank {self.rank}: "
                f"{'; '.join(texts)} within the process group's timeout. Read the output of the other ranks, and "
                "restart from the last checkpoint."
            ) from error or lost

    def is_equal(self, value: object) -> bool:
        """Return whether all ranks pass the same value, by its digest. All ranks call this."""
        numbers, tree = _digest(value), self.tree
        with self._naming_lost(_Outcome[None](), None):
            return _is_equal(tree.max(_bounds(numbers)))

    def are_equal(self, values: Sequence[object] | Mapping[int, object], num_values: int | None = None) -> list[bool]:
        """Return for each place whether all ranks that pass a value there pass the same value.

        The ranks exchange a digest of 8 bytes per place. Different values have equal digests in one of 2^56 cases.

        Args:
            values: one value per place, equally many on all ranks; or {place: value} for some of the places.
            num_values: the number of places. None: the number of values.
        """
        tree = self.tree
        by_place = values if isinstance(values, Mapping) else dict(enumerate(values))
        num_values = len(values) if num_values is None else num_values
        bounds = [_NO_VALUE] * (2 * num_values)
        for place, value in by_place.items():
            number = _digest(value)[0]
            bounds[place], bounds[num_values + place] = number, -number
        with self._naming_lost(_Outcome[None](), None):
            largest = tree.max(bounds)
        return [high == -low for high, low in zip(largest[:num_values], largest[num_values:], strict=True)]

    def any(self, value: bool) -> bool:
        """Return whether `value` is true on any rank."""
        tree = self.tree
        with self._naming_lost(_Outcome[bool](), None):
            return bool(tree.max([value])[0])

    def all(self, value: bool) -> bool:
        """Return whether `value` is true on every rank."""
        return not self.any(not value)


@dataclass(slots=True)
class _Outcome(Generic[T]):
    """The outcome of an action on one rank: its result, or its error's text and, if a ZeroAmpError, its class."""

    result: T | None = None
    text: str | None = None
    error_type: type[ZeroAmpError] | None = None


@dataclass(slots=True)
class _Reply(Generic[R]):
    """The first rank's reply to a rank: the combined result, or the error to raise."""

    value: R | None = None
    failure: "_Failure | None" = None


class _Failure(NamedTuple):
    """The error that all ranks raise."""

    error_type: type[ZeroAmpError]
    text: str


def _attempt(action: Callable[[], T]) -> tuple[_Outcome[T], BaseException | None]:
    """Call `action` on this rank. Return its outcome, and the error that it raised, or None."""
    try:
        return _Outcome(action()), None
    except (Exception, _checkpoint_exception()) as raised:
        return _Outcome(None, _text(raised), type(raised) if isinstance(raised, ZeroAmpError) else None), raised


def _digest(value: object) -> list[int]:
    """Return a hash of a value as four integers of 56 bits, whose negatives fit int64 too."""
    digest = sha256(pickle.dumps(value)).digest()
    return [int.from_bytes(digest[start : start + 7]) for start in range(0, 28, 7)]


def _bounds(numbers: list[int]) -> list[int]:
    """Return the numbers and their negatives: the maximum of the negatives over the ranks is minus the minimum."""
    return [*numbers, *(-number for number in numbers)]


def _is_equal(largest: list[int]) -> bool:
    """Return whether the numbers are equal on all ranks. `largest`: the maxima of their `_bounds` over the ranks."""
    half = len(largest) // 2
    return all(high == -low for high, low in zip(largest[:half], largest[half:], strict=True))


def _failure(outcomes: Sequence[_Outcome[Any]]) -> _Failure | None:
    """Return the common error of the ranks' outcomes, which are in rank order; None if none failed."""
    ranks_by_text: dict[str, list[int]] = {}
    types = set()
    for rank, outcome in enumerate(outcomes):
        if outcome.text is not None:
            ranks_by_text.setdefault(outcome.text, []).append(rank)
            types.add(outcome.error_type)
    if not ranks_by_text:
        return None
    (common, *others) = types
    error_type = CheckpointError if others or common is None else common
    texts = []
    for text, ranks in ranks_by_text.items():
        where = "" if len(ranks) == len(outcomes) else f"rank {', '.join(map(str, ranks))}: "
        texts.append(where + text)
    return _Failure(error_type, "; ".join(texts))


def _combined(
    outcomes: Sequence[_Outcome[T]], combine: Callable[[list[T]], Sequence[R]]
) -> tuple[list[_Reply[R]], BaseException | None]:
    """Return the first rank's replies to the outcomes, and the error that `combine` raised."""
    failure, raised = _failure(outcomes), None
    if failure is None:
        combined, raised = _attempt(lambda: combine([outcome.result for outcome in outcomes]))  # type: ignore[misc]
        failure = _failure([combined, *[_Outcome[Any]()] * (len(outcomes) - 1)])
        if combined.result is not None:
            return [_Reply(value) for value in combined.result], None
    return [_Reply(failure=failure)] * len(outcomes), raised


def _raise(failure: _Failure | None, cause: BaseException | None) -> None:
    if failure is None:
        return
    error_type, text = failure
    if cause is not None and type(cause) is error_type and str(cause) == text:
        raise cause  # the error is the same on all ranks
    raise error_type(text) from cause


def _checkpoint_exception() -> "type[CheckpointException]":
    """Return torch's class of failed saves and loads, which is not a subclass of Exception.

    It is imported here, because wrapping a model imports this file and needs no checkpoints of torch.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException


def _text(error: BaseException) -> str:
    if isinstance(error, _checkpoint_exception()):  # contains the errors of all ranks; its own text is a traceback
        return "; ".join(f"rank {rank}: {_text(wrapped)}" for rank, (wrapped, _) in sorted(error.failures.items()))
    return error_text(error)

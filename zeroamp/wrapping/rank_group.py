"""`RankGroup`: a process group of a model's ranks on the CPU, and errors of one rank that are raised on all of them.

A rank that raises alone leaves the others in a collective that never ends. `RankGroup.run` calls a function on every
rank, exchanges the outcomes, and raises on all ranks if it failed on any.
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.hooks._torch.fsdp import timeout_of
from zeroamp.hooks.collectives.gloo_exit import pause_before_exit
from zeroamp.policies.errors import CheckpointError, ZeroAmpError, error_text

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")
Use = Literal["saving", "signals"]
_USES: dict[Use, str] = {
    "saving": "save or load",
    "signals": "agree on what is reported of the run (RunReport, monitors, profile) and on signals",
}
"""What the ranks do in a group of a use, for the text of an error."""
_shared: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], RankGroup]]" = WeakKeyDictionary()


class RankGroup:
    """A gloo process group of the ranks of a mesh.

    It is separate from the process groups of training, so that a background save does not mix with their collectives.
    """

    def __init__(self, mesh: DeviceMesh, use: Use = "saving") -> None:
        """Make the group, with the timeout of the mesh's own. All ranks of `mesh` call this."""
        ranks = sorted(mesh.mesh.flatten().tolist())
        timeout = timeout_of(mesh.get_group(0), mesh.device_type)
        # Local synchronization only if the mesh is a part of the world: torch then names the group by the number of
        # groups that a rank is in, and ranks in different numbers of groups would wait for ever.
        is_local = len(ranks) < dist.get_world_size()
        self.group: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timeout, backend="gloo", use_local_synchronization=is_local
        )
        pause_before_exit()
        self.rank = dist.get_rank(self.group)
        self.num_ranks = len(ranks)
        self._use = use
        self.background: Future[Any] | None = None
        """A save whose thread uses the group."""

    @classmethod
    def shared(cls, mesh: DeviceMesh, use: Use) -> "RankGroup":
        """Return the group of the mesh's ranks for a use. The first call, on all of them, makes it.

        Models share it: each group costs connections and threads, which last until the process ends.
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

        If that save failed, `Saving` raises its error; this method does not.
        """
        ranks = cls.shared(mesh, "saving")
        if ranks.background is not None:
            wait([ranks.background])
            ranks.background = None
        return ranks

    @classmethod
    def for_signals(cls, mesh: DeviceMesh) -> "RankGroup":
        """Return the shared group for flags and reports of the main thread, which no save in the background uses."""
        return cls.shared(mesh, "signals")

    def run(self, action: Callable[[], T]) -> list[T]:
        """Call `action` on every rank and return the results of all, in rank order.

        Raises:
            CheckpointError: on all ranks, if `action` raised on any, with the text of each error. On the remaining
                ranks, if a rank is lost.
            ZeroAmpError: on all ranks, if all errors have the same subclass: that subclass.
        """
        outcome: _Outcome[T] = _Outcome()
        error: BaseException | None = None
        try:
            outcome.result = action()
        except (Exception, _checkpoint_exception()) as raised:
            error = raised
            outcome.text, outcome.error_type = _text(raised), type(raised) if isinstance(raised, ZeroAmpError) else None
        outcomes = self._exchange(outcome, error)
        _raise_if_failed(outcomes, error)
        return [outcome.result for outcome in outcomes]

    def _exchange(self, outcome: "_Outcome[T]", error: BaseException | None) -> list[Any]:
        outcomes: list[Any] = [None] * self.num_ranks
        try:
            dist.all_gather_object(outcomes, outcome, group=self.group)
        except RuntimeError as lost:  # gloo names neither the collective nor who waited
            texts = [_text(lost)] if outcome.text is None else [outcome.text, _text(lost)]
            raise CheckpointError(
                f"all_gather_object of the {self.num_ranks} ranks that {_USES[self._use]} failed on rank {self.rank}: "
                f"{'; '.join(texts)}. A rank is lost or did not answer within the process group's timeout: look at the "
                "output of the other ranks, and restart from the last checkpoint."
            ) from error or lost
        return outcomes

    def on_first(self, action: Callable[[], T]) -> T:
        """Call `action` on the first rank only, and return its result on all. Raises as `run` does."""
        return self.run(lambda: action() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def any(self, value: bool) -> bool:
        """Return whether `value` is true on any rank."""
        flag = torch.tensor([value], dtype=torch.uint8)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flag.item())

    def all(self, value: bool) -> bool:
        """Return whether `value` is true on every rank."""
        return not self.any(not value)


@dataclass(slots=True)
class _Outcome(Generic[T]):
    """Of an action on one rank: its result, or the text of its error and, if it is one of the tree, its class."""

    result: T | None = None
    text: str | None = None
    error_type: type[ZeroAmpError] | None = None


def _raise_if_failed(outcomes: list[_Outcome[T]], cause: BaseException | None) -> None:
    ranks_by_text: dict[str, list[int]] = {}
    types = set()
    for rank, outcome in enumerate(outcomes):
        if outcome.text is not None:
            ranks_by_text.setdefault(outcome.text, []).append(rank)
            types.add(outcome.error_type)
    if not ranks_by_text:
        return
    (common, *others) = types
    error_type = CheckpointError if others or common is None else common
    texts = []
    for text, ranks in ranks_by_text.items():
        where = "" if len(ranks) == len(outcomes) else f"rank {', '.join(map(str, ranks))}: "
        texts.append(where + text)
    text = "; ".join(texts)
    if cause is not None and type(cause) is error_type and str(cause) == text:
        raise cause  # the same on all ranks
    raise error_type(text) from cause


def _checkpoint_exception() -> "type[CheckpointException]":
    """Return torch's class of failed saves and loads, which is no subclass of Exception.

    Imported here and not above: wrapping a model imports this file, and need not import torch's checkpoints.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException


def _text(error: BaseException) -> str:
    if isinstance(error, _checkpoint_exception()):  # all ranks have it already, and its own text is a traceback
        return "; ".join(f"rank {rank}: {_text(wrapped)}" for rank, (wrapped, _) in sorted(error.failures.items()))
    return error_text(error)

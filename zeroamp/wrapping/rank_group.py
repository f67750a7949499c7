"""What one rank cannot do, no rank goes on from: an error of one is raised on all."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.hooks._torch.fsdp import timeout_of
from zeroamp.hooks.collectives.exit_pause import pause_before_exit
from zeroamp.policies.errors import CheckpointError, ZeroAmpError, describe

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")
Use = Literal["saving", "signals"]
_USES: dict[Use, str] = {
    "saving": "save or load",
    "signals": "agree on what is reported of the run (RunReport, monitors, profile) and on signals",
}
"""What ranks do together in a group of a use, for the text of an error."""
_shared: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], Agreement]]" = WeakKeyDictionary()


class Agreement:
    """A process group on the CPU, beside those of training: a background save must not get between their calls."""

    def __init__(self, mesh: DeviceMesh, use: Use = "saving") -> None:
        """Make the group; all ranks of `mesh` do. It waits as long as the mesh's own."""
        ranks = sorted(mesh.mesh.flatten().tolist())
        timeout = timeout_of(mesh.get_group(0), mesh.device_type)
        # Local where it must be only: torch then names the group by how many groups a rank is in, so that ranks that
        # are in other numbers of them would never meet.
        is_local = len(ranks) < dist.get_world_size()
        self.group: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timeout, backend="gloo", use_local_synchronization=is_local
        )
        pause_before_exit()
        self.rank = dist.get_rank(self.group)
        self.num_ranks = len(ranks)
        self._use = use
        self.background: Future[Any] | None = None
        """What uses the group in a thread, if something does."""

    @classmethod
    def shared(cls, mesh: DeviceMesh, use: Use) -> "Agreement":
        """Return the one of the mesh's ranks for a use; the first call, on all of them, makes it.

        Models share it: each group costs connections and threads, and nothing closes them before the process ends.
        """
        world = dist.group.WORLD
        if world is None:
            raise AssertionError("expected the process group of a wrapped model")
        of_world = _shared.setdefault(world, {})
        key = use, tuple(sorted(mesh.mesh.flatten().tolist()))
        if key not in of_world:
            of_world[key] = cls(mesh, use)
        return of_world[key]

    def wait(self) -> None:
        """Wait until the group is free; whether the background failed is not asked here."""
        if self.background is not None:
            wait([self.background])
            self.background = None

    def run(self, action: Callable[[], T]) -> list[T]:
        """Call `action` on every rank and return the results of all, in rank order.

        Raises:
            CheckpointError: on all ranks, where `action` raised on any, with the text of each. It is of another class
                of the tree if all of them are. Where a rank is lost, on the others, naming the collective.
        """
        outcome: _Outcome[T] = _Outcome()
        try:
            outcome.result = action()
        except (Exception, _checkpoint_exception()) as raised:
            error: BaseException | None = raised
            outcome.text, outcome.error_type = _text(raised), type(raised) if isinstance(raised, ZeroAmpError) else None
        else:
            error = None
        outcomes = self._gather(outcome, error)
        _raise_if_failed(outcomes, error)
        return [outcome.result for outcome in outcomes]

    def _gather(self, outcome: "_Outcome[T]", error: BaseException | None) -> list[Any]:
        outcomes: list[Any] = [None] * self.num_ranks
        try:
            dist.all_gather_object(outcomes, outcome, group=self.group)
        except RuntimeError as lost:  # gloo names neither the collective nor who waited
            texts = [_text(lost)] if outcome.text is None else [outcome.text, _text(lost)]
            raise CheckpointError(
                describe(
                    f"all_gather_object of the {self.num_ranks} ranks that {_USES[self._use]}, on rank {self.rank}",
                    "; ".join(texts),
                    "an answer of every rank before the process group's timeout",
                    "Look at the other ranks, and restart from the last checkpoint.",
                )
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
    raise error_type("; ".join(texts)) from cause


def _checkpoint_exception() -> "type[CheckpointException]":
    """Return torch's class of failed saves and loads, which is no Exception.

    Not imported with this file, which every wrapped model needs: it brings all of torch's checkpoints.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException


def _text(error: BaseException) -> str:
    if isinstance(error, _checkpoint_exception()):  # it has agreed already, and its own text is a traceback
        return "; ".join(f"rank {rank}: {_text(wrapped)}" for rank, (wrapped, _) in sorted(error.failures.items()))
    return str(error) if isinstance(error, ZeroAmpError) else f"{type(error).__name__}: {error}"

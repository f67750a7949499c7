"""`RankGroup`: runs parts of saves, loads and reports on all ranks, and raises an error of one rank on all of them."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.hooks._torch.fsdp import timeout_of
from zeroamp.hooks._torch.process_groups import group_of_parts, of_default_group
from zeroamp.hooks.collectives.gloo_exit import pause_before_exit
from zeroamp.policies.errors import CheckpointError, error_text
from zeroamp.wrapping.run_alike import Outcome, attempt, raise_failure

T = TypeVar("T")
Use = Literal["saving", "signals"]
"""What a group is for: saves and loads, or reports (RunReport) and signals of the main thread."""
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
        timeout: timedelta | None = timeout_of(mesh.get_group(0), mesh.device_type)
        # NCCL's default, 10 minutes, is short for writing. None: gloo's default, 30 minutes.
        self._timeout = None if timeout == default_pg_nccl_timeout else timeout
        self._use = use
        self._group: dist.ProcessGroup | None = None
        self.background: Future[Any] | None = None
        """The last background save, whose thread uses the group, until its error was raised. None if there is none."""

    @classmethod
    def shared(cls, mesh: DeviceMesh, use: Use) -> "RankGroup":
        """Return the group of the mesh's ranks for a use. All models of the process share it.

        Each group costs connections and threads, which last until the program destroys its process groups.
        """
        shared = of_default_group(_shared)
        key = use, tuple(sorted(mesh.mesh.flatten().tolist()))
        if key not in shared:
            shared[key] = cls(mesh, use)
        return shared[key]

    @classmethod
    def for_saving(cls, mesh: DeviceMesh) -> "RankGroup":
        """Return the shared group for saving and loading. Waits until a background save has ended.

        If the background save failed, `wait_for_save` raises its error. This method does not.
        """
        ranks = cls.shared(mesh, "saving")
        if ranks.background is not None:
            wait([ranks.background])
        return ranks

    def run(self, action: Callable[[], T]) -> list[T]:
        """Call `action` on every rank and return the results of all, in rank order.

        Raises:
            CheckpointError: on all ranks, if `action` raised on any, with the text of each error. On the remaining
                ranks, if a rank is lost.
            ZeroAmpError: on all ranks, if all errors have the same subclass: that subclass.
        """
        self._connect()  # before the action: a rank that is lost during the action is then noticed at once
        outcome, error = attempt(action)
        outcomes = self._gather(outcome, error)
        raise_failure(outcomes, self.ranks, CheckpointError, error)
        return [each.result for each in outcomes]  # type: ignore[misc]

    def on_first(self, action: Callable[[], T]) -> T:
        """Call `action` on the first rank only, and return its result on all. Raises as `run` does."""
        return self.run(lambda: action() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def refuse_different(self, call: str, arguments: Callable[[], dict[str, Any]]) -> None:
        """Raise CheckpointError on all ranks if they made a call with different arguments. Also raises as `run`."""
        of_ranks = self.run(arguments)
        for name, first in of_ranks[0].items():
            values = [of_rank[name] for of_rank in of_ranks]
            if any(value != first for value in values):
                found = " and ".join(sorted({repr(value) for value in values}))
                raise CheckpointError(
                    f"{call} needs the same {name} on all ranks, but got {found}. Pass the same value. If a rank "
                    "failed in between, load the last checkpoint."
                )

    def _connect(self) -> dist.ProcessGroup:
        if self._group is None:
            self._group = group_of_parts([self.ranks], self._timeout, "gloo", use=self._use)
            pause_before_exit()
        return self._group

    def communicate(self, collective: Callable[[dist.ProcessGroup], T], error: BaseException | None = None) -> T:
        """Call `collective` with the gloo process group, on every rank.

        Args:
            collective: communicates over the group, by functions of torch.
            error: an earlier error of this rank, for the text if the communication fails.

        Raises:
            CheckpointError: a rank is lost.
        """
        try:
            return collective(self._connect())
        except RuntimeError as lost:
            texts = [str(lost).strip()] if error is None else [error_text(error), str(lost).strip()]
            raise CheckpointError(
                f"An exchange between the {self.num_ranks} ranks for {self._use} failed on rank {dist.get_rank()}: "
                f"{'; '.join(texts)}. A rank is lost, or did not answer within the process group's "
                "timeout. Read the output of the other ranks, and restart from the last checkpoint."
            ) from error or lost

    def _gather(self, outcome: "Outcome[T]", error: BaseException | None) -> "list[Outcome[T]]":
        outcomes: list[Any] = [None] * self.num_ranks
        self.communicate(lambda group: dist.all_gather_object(outcomes, outcome, group=group), error)
        return outcomes

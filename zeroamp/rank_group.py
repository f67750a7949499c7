"""`RankGroup`: runs parts of saves, loads and reports on all ranks, and raises an error of one rank on all of them.

[Note: Exchanges]
gloo pairs the k-th collective of one rank with the k-th of another, whatever they are for. A rank that was interrupted
(Ctrl-C) and goes on with another call would get results that are for something else. So:

* Each exchange begins with one all-gather, of the name and number of its call, and of the name of its action. If they
  differ, all ranks raise, and count the next call alike.
* It runs in a thread of its own. An exception that a signal raises in the main thread cannot end it midway.
* An action that is interrupted is an error like others, which the other ranks get.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
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


@dataclass(frozen=True, slots=True)
class _Message:
    """What each rank sends first in an exchange."""

    call: str
    """The public function, such as `save_checkpoint`."""
    num_calls: int
    """How many calls this rank has made, this one included."""
    num_exchanges: int
    """How many exchanges this call has made, this one included."""
    action: str
    outcome: Outcome[Any]

    @property
    def place(self) -> str:
        """What must be equal on all ranks."""
        return f"{self.call} (call {self.num_calls}, exchange {self.num_exchanges}, {self.action})"


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
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"zeroamp-{use}")
        """Runs the exchanges, one after another. The thread starts at the first one."""
        self._call: str | None = None
        """The name of the present call. None: that of the function whose action is exchanged."""
        self._begins_call = True
        self._num_calls = self._num_exchanges = 0
        self._background: Future[Any] | None = None
        """The background save whose thread uses the group. None if there is none."""

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
    def for_saving(cls, mesh: DeviceMesh, call: str | None = None) -> "RankGroup":
        """Return the shared group for saving and loading, for one call. Waits until a background save has ended.

        If the background save failed, `wait_for_save` raises its error. This method does not. `call`: the name of the
        public function, for errors. None: that of the function whose action runs first.
        """
        ranks = cls.shared(mesh, "saving")
        if (background := ranks._background) is not None:
            wait([background])
        ranks._call, ranks._begins_call = call, True
        return ranks

    def begin_background(self, future: "Future[Any]") -> None:
        """Let the next call wait for a background save. The group does not hold the future when it is done."""
        self._background = future
        future.add_done_callback(self._end_background)

    def _end_background(self, future: "Future[Any]") -> None:
        if self._background is future:
            self._background = None

    def run(self, action: Callable[[], T]) -> list[T]:
        """Call `action` on every rank and return the results of all, in rank order.

        Raises:
            CheckpointError: on all ranks, if `action` raised on any, with the text of each error, or if the ranks
                exchange results of different calls. On the remaining ranks, if a rank is lost.
            ZeroAmpError: on all ranks, if all errors have the same subclass: that subclass.
        """
        return [message.outcome.result for message in self._exchange(action)[0]]  # type: ignore[misc]

    def on_first(self, action: Callable[[], T]) -> T:
        """Call `action` on the first rank only, and return its result on all. Raises as `run` does."""
        return self.run(self._of_first(action))[0]  # type: ignore[return-value]

    def gather(self, action: Callable[[], T]) -> list[T]:
        """Call `action` on every rank. Return the results of all to the first rank, and [] to others.

        Raises as `run` does.
        """

        def send(result: T, group: dist.ProcessGroup) -> list[T]:
            found: list[Any] = [None] * self.num_ranks if self.rank == 0 else []
            dist.gather_object(result, found or None, dst=self.ranks[0], group=group)
            return found

        return self._exchange(action, send)[1]  # type: ignore[no-any-return]

    def scatter(self, action: Callable[[], list[T]]) -> T:
        """Call `action` on the first rank only, and return to each rank its entry of the result.

        Raises as `run` does.
        """

        def send(result: list[T] | None, group: dist.ProcessGroup) -> T:
            found: list[Any] = [None]
            dist.scatter_object_list(found, result, src=self.ranks[0], group=group)
            return found[0]  # type: ignore[no-any-return]

        return self._exchange(self._of_first(action), send)[1]  # type: ignore[no-any-return]

    def _of_first(self, action: Callable[[], T]) -> Callable[[], T | None]:
        return action if self.rank == 0 else partial(_nothing, action)

    def _exchange(
        self, action: Callable[[], Any], send: Callable[[Any, dist.ProcessGroup], Any] | None = None
    ) -> tuple[list[_Message], Any]:
        """Call `action`, and return the messages of all ranks, and what `send` returned: see [Note: Exchanges].

        Without `send` the messages contain the results.
        """
        name = _name_of(action)
        call = self._call or name.partition(".<locals>")[0]
        if self._group is None:  # before the action: a rank that is lost during the action is then noticed at once
            self._wait_for(self._thread.submit(self._connect), call)
        try:
            outcome, error = attempt(action)
        except BaseException as interrupt:
            outcome, error = Outcome(None, error_text(interrupt)), interrupt
        result = outcome.result
        if send is not None and error is None:
            outcome = Outcome(None)

        begins_call, self._begins_call = self._begins_call, False

        def communicate() -> tuple[list[_Message], Any]:
            group = self._connect()
            if begins_call:
                self._num_calls, self._num_exchanges = self._num_calls + 1, 0
            self._num_exchanges += 1
            own = _Message(call, self._num_calls, self._num_exchanges, name, outcome)
            messages: list[Any] = [None] * self.num_ranks
            dist.all_gather_object(messages, own, group=group)
            is_same = len({message.place for message in messages}) == 1
            if not is_same:
                self._num_calls, self._begins_call = max(message.num_calls for message in messages), True
            if not is_same or send is None or any(message.outcome.text is not None for message in messages):
                return messages, None
            return messages, send(result, group)

        messages, sent = self._wait_for(self._thread.submit(communicate), call, error)
        if error is not None and not isinstance(error, Exception):
            raise error
        if len(places := dict.fromkeys(message.place for message in messages)) > 1:
            raise CheckpointError(
                f"{call} stopped, because the ranks are in different calls: {' and '.join(sorted(places))}. A rank was "
                "interrupted, or did not make a call that others made. Make the same call on all ranks."
            )
        raise_failure([message.outcome for message in messages], self.ranks, CheckpointError, error)
        return messages, sent

    def _wait_for(self, future: "Future[T]", call: str, error: BaseException | None = None) -> T:
        """Return what an exchange of this rank returned. `error`: an earlier error of this rank, for the text.

        Raises:
            CheckpointError: a rank is lost.
        """
        try:
            return future.result()
        except RuntimeError as lost:
            texts = [str(lost).strip()] if error is None else [error_text(error), str(lost).strip()]
            raise CheckpointError(
                f"{call} failed on rank {dist.get_rank()}, in an exchange between the {self.num_ranks} ranks for "
                f"{self._use}: {'; '.join(texts)}. A rank is lost, or did not answer within the process group's "
                "timeout. Read the output of the other ranks, and restart from the last checkpoint."
            ) from error or lost

    def refuse_different(self, call: str, arguments: Callable[[], dict[str, Any]]) -> None:
        """Raise CheckpointError on all ranks if they made a call with different arguments. Also raises as `run`."""
        self._call = call
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


def _nothing(action: Callable[[], Any]) -> None:
    """Run on the other ranks where `action` runs on the first only: it names the exchange."""


def _name_of(action: Any) -> str:
    """Return the qualified name of a function, which is the same on all ranks."""
    while isinstance(action, partial):
        action = action.args[0] if action.func is _nothing else action.func
    return str(getattr(action, "__qualname__", type(action).__qualname__))

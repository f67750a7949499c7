"""The order of the collectives that this rank issued in an optimizer step, and what is said of one that fails or waits.

Ranks compare their orders: with `TrainStep` in `zeroamp/training/rank_agreement.py`, in other loops in
`zeroamp/wrapping/reduction_order.py`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import blake2b
from typing import Any, TypeVar

import torch.distributed as dist

from zeroamp.hooks.collectives.traffic import STEP, CollectiveListener, IssuedCollective, ReduceOp, notify
from zeroamp.hooks.tensors import HostCopy
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import PeerError, printable

logger = logging.getLogger("zeroamp.rank")  # each rank prints its own

T = TypeVar("T")

_GLOO = ("gloo/", "Application timeout caused pair closure")  # gloo raises plain RuntimeErrors


def _text(issued: IssuedCollective) -> str:
    """Return a collective, its group, size, dtype and op as text, the same on all ranks."""
    where = "the optimizer step" if issued.group_name == STEP else issued.group_name
    op = "" if issued.op == dist.ReduceOp.SUM else f", {str(issued.op).rpartition('.')[2]}"
    return f"{issued.collective} of {where} ({issued.tensor.numel()} elements, {short_name(issued.tensor.dtype)}{op})"


def _text_with_ranks(issued: IssuedCollective) -> str:
    """Return a collective as text, with the ranks that must issue it."""
    ranks = dist.get_process_group_ranks(issued.process_group)
    return f"{_text(issued)} over ranks {', '.join(map(str, ranks))}"


MOST_LISTED = 2_000
"""How many collectives of a step are retained as text. An evaluation before the step may issue millions."""


class CallOrder:
    """The order of collectives: a hash of all of them, and the texts of the first `MOST_LISTED`."""

    def __init__(self) -> None:
        self.last: list[str] = []
        """The collectives since the last call of `shorten`, as texts. A listener appends to this list."""
        self._first: list[str] = []
        self._num_calls = 0
        self._hash = blake2b(digest_size=8)

    def shorten(self) -> None:
        """Hash the texts in `last`, and retain those of the first collectives only."""
        self._num_calls += len(self.last)
        self._hash.update("\n".join((*self.last, "")).encode())
        self._first += self.last[: MOST_LISTED - len(self._first)]
        self.last.clear()

    @property
    def first(self) -> list[str]:
        """The first collectives."""
        self.shorten()
        return self._first

    def digest(self) -> bytes:
        """Return a hash of 8 bytes, which is the same on ranks that issued the same collectives in the same order."""
        self.shorten()
        return self._hash.digest()

    def describe(self) -> Mapping[str, str]:
        """Return how often each collective was issued, and the collective at each position, as text."""
        counts = {f"the count of {text}": str(count) for text, count in Counter(self.first).items()}
        calls = {f"collective {number}": text for number, text in enumerate(self.first, 1)}
        return {**counts, **calls, "the number of collectives": str(self._num_calls)}


@dataclass(slots=True)
class IssuedInStep:
    """Listens to the collectives of the parameter groups. Reads sizes and dtypes, never values."""

    own_units: frozenset[str] = frozenset()
    """Names of the groups of embeddings and heads that are units of their own."""
    is_counted: bool = False
    """Whether a `TrainStep` counts steps and backwards here."""
    step: int = 1
    """Number of the current optimizer step. The first one after this object was built is 1."""
    num_backwards: int = 0
    """Backwards begun since the last optimizer step, including those that `zero_grad` discarded."""
    calls: CallOrder = field(default_factory=CallOrder)
    """The collectives since the last optimizer step."""
    reductions: CallOrder = field(default_factory=CallOrder)
    """The reductions of gradients among them. In a loop without `TrainStep`, `compare_orders` begins a new order."""
    before: tuple[HostCopy, CallOrder, list[list[tuple[str, object]]]] | None = None
    """On other devices than a CPU, of the previous optimizer step: the maxima over the ranks, the reductions, and the
    hyperparameters."""
    _texts: dict[tuple[object, ...], tuple[str, ReduceOp]] = field(default_factory=dict)
    """Collective, group, dtype, size and id of the op -> its text, and the op, so that its id is not reused. Hashing
    the op itself would double the time of a call."""

    def on_collective(self, issued: IssuedCollective) -> None:
        """Append a parameter group's collective. That of the optimizer step itself is left out."""
        collective, tensor, group_name, _, op = issued
        if group_name == STEP:
            return
        key = collective, group_name, tensor.dtype, tensor.numel(), id(op)
        found = self._texts.get(key)
        if found is None:
            self._texts[key] = found = _text(issued), op
        self.calls.last.append(found[0])
        if collective != "all_gather":
            self.reductions.last.append(found[0])
        if len(self.calls.last) > MOST_LISTED:
            self.calls.shorten()
            self.reductions.shorten()

    def end_step(self) -> None:
        """Begin the next optimizer step. The orders become new objects, so that a caller may retain the old ones."""
        self.step += 1
        self.num_backwards, self.calls, self.reductions = 0, CallOrder(), CallOrder()


def issue(
    call: Callable[..., T], issued: IssuedCollective, listeners: Sequence[CollectiveListener], *arguments: Any
) -> T:
    """Call `call(*arguments)`, which issues one collective, and notify the listeners of the collective.

    Raises:
        PeerError: the backend ended the collective. See `peer_lost`.
    """
    try:
        result = call(*arguments)
    except RuntimeError as error:
        raise peer_lost(error, issued, listeners) from error
    notify(listeners, issued)
    return result


def peer_lost(
    error: RuntimeError, issued: IssuedCollective | None, listeners: Sequence[CollectiveListener] = ()
) -> Exception:
    """Return a PeerError if the backend ended a collective: by its timeout, or because another rank ended.

    Other errors of this rank (out of memory, an error of the device) are returned unchanged. `issued` is None for a
    collective that FSDP2 issued.
    """
    is_of_backend = isinstance(error, dist.DistError) or any(words in str(error) for words in _GLOO)
    if not is_of_backend or isinstance(error, PeerError):
        return error
    what = "collective of FSDP2"
    if issued is not None:
        what = _text_with_ranks(issued)
    step = next((listener for listener in listeners if isinstance(listener, IssuedInStep)), None)
    place = ""
    if step is not None and step.is_counted and issued is not None and issued.group_name == STEP:
        place = f" at the end of optimizer step {step.step - 1}"
    elif step is not None and step.is_counted:
        last = f" after the {step.calls.last[-1]}" if issued is None and step.calls.last else ""
        place = f" in optimizer step {step.step}{last}, where {step.num_backwards} backwards had begun"
    own_unit = ""
    if step is not None and issued is not None and issued.group_name in step.own_units:
        own_unit = (
            f" The output of {issued.group_name.partition(':')[0]} must be in the loss of every rank that calls it. If "
            'a loss does not use it, add 0 * output.sum() to that loss, or set "zeroamp": {"own_units": false}.'
        )
    if "Duplicate GPU" in str(error):
        return PeerError(
            f"Rank {dist.get_rank()} uses the same GPU as another rank of its host: {str(error).strip()}. Start the "
            "script with torchrun, whose LOCAL_RANK chooses the GPU, or call torch.cuda.set_device before anything "
            "uses a GPU."
        )
    return PeerError(
        f"Rank {dist.get_rank()} waited for the {what}{place}, and the process group ended it: {str(error).strip()}. "
        "Another rank has ended or did not issue the same collective. Read the output of the other ranks, and check "
        "that all ranks run the same modules, micro-batches, evaluations and saves: no rank may skip a block that "
        "others run, also not at random (LayerDrop, stochastic depth). If a rank may skip a module, "
        'name the module in "zeroamp": {"optional_units": [...]}.'
        f"{own_unit} Restart from the last checkpoint."
    )


WARN_AFTER = timedelta(seconds=60)
"""How long a rank waits until it logs which collective it waits for. If the timeout of the process group is shorter,
the rank raises a PeerError first, which says the same."""


class NamedWork(dist.Work):
    """Wraps the work of an asynchronous collective, so that its error, and a log message of a long wait, name it."""

    def __init__(self, work: dist.Work, issued: IssuedCollective, listeners: Sequence[CollectiveListener]) -> None:
        super().__init__()
        self._work, self._issued, self._listeners = work, issued, listeners

    def wait(self, *arguments: object) -> bool:
        """Wait for the collective. Raises a PeerError if the backend ended it: see `peer_lost`.

        On a CPU, where a wait blocks the host, a wait without a timeout logs a WARNING after `WARN_AFTER`.
        """
        try:
            # With a timeout, NCCL would block the host, and abort the collective at the timeout.
            if arguments or not self._issued.tensor.is_cpu:
                return self._work.wait(*arguments)  # type: ignore[arg-type]
            try:
                return self._work.wait(WARN_AFTER)
            except RuntimeError:
                if not self._work.is_completed():
                    _log_wait(self._issued)
            # A wait that timed out leaves the collective as it is. A collective that failed raises its error again.
            return self._work.wait()
        except RuntimeError as error:
            raise peer_lost(error, self._issued, self._listeners) from error


def _log_wait(issued: IssuedCollective) -> None:
    """Log that this rank has waited for `WARN_AFTER`, and the likely cause."""
    logger.warning(
        "Rank %d has waited %g s for the %s. It waits on, until the timeout of the process group. Perhaps other ranks "
        "do not run this forward or backward: every rank must run the same ones, and evaluate, generate and save.",
        *(dist.get_rank(), WARN_AFTER.total_seconds(), printable(_text_with_ranks(issued))),
    )

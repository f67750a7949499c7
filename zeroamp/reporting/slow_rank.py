"""Finds a rank for which the others wait, by the busy times of all ranks."""

from collections.abc import Callable, Sequence
from statistics import median

from zeroamp.training.callbacks import Callback, Receive

STEPS_PER_CHECK = 50
"""Steps between two exchanges of the ranks' busy times."""
SLOW_RANK_MARGIN = 0.2
"""A rank is slow if its busy time is more than this fraction above the median of all ranks."""


class SlowRankCheck(Callback):
    """Exchanges the ranks' busy times every `STEPS_PER_CHECK` steps, in the all-reduce of that step.

    Each rank sends its median, so that one slow step does not make a slow rank. The first step, which allocates and
    compiles, is left out. Each rank puts its number at its own index among zeros, so the sum has those of all ranks.
    """

    def __init__(self, rank: int, num_ranks: int, warn: Callable[[str], None]) -> None:
        """`warn` is called with the text of the warning, once, on the first rank."""
        self.is_open = True
        """Whether this rank takes part. It sends zeros otherwise: after an error a rank may close its report alone."""
        self._rank, self._num_ranks, self._warn = rank, num_ranks, warn
        self._num_steps = 0  # the same on all ranks
        self._has_warned = rank > 0
        self._busy_s: list[float] | None = None  # since the last exchange; None before the first step

    def add(self, busy_s: float) -> None:
        """Record the busy time of one step."""
        if self._busy_s is None:
            self._busy_s = []
        else:
            self._busy_s.append(busy_s)

    def statistics(self) -> tuple[Sequence[float], Receive]:
        """Return this rank's number for the all-reduce. Most steps have none."""
        num_taken = self._num_steps - 1  # without the first step
        self._num_steps += 1
        if num_taken <= 0 or num_taken % STEPS_PER_CHECK:
            return super().statistics()
        busy_s, numbers = self._busy_s or [], [0.0] * self._num_ranks
        self._busy_s = []
        if self.is_open and busy_s:
            numbers[self._rank] = median(busy_s)
        return numbers, self._look

    def _look(self, busy_s: Sequence[float]) -> None:
        if self._has_warned or not self.is_open or not all(busy_s):  # another rank has closed its report
            return
        typical, slowest = median(busy_s), max(busy_s)
        if slowest > (1 + SLOW_RANK_MARGIN) * typical:
            self._has_warned = True
            self._warn(
                f"rank {busy_s.index(slowest)} was busy for {slowest * 1e3:.1f} ms per step (median of the last "
                f"{STEPS_PER_CHECK} steps), {slowest / typical - 1:.0%} above the median of the ranks "
                f"({typical * 1e3:.1f} ms). The other ranks wait for it. Check its data loading, its clocks and other "
                "processes on its node"
            )

"""`StepSums`: numbers that features add to the one all-reduce of each optimizer step, and their sums over the ranks.

Preemption, background saves and `RunReport` exchange numbers between the ranks in every step. They add them to the
step's all-reduce, so a step has no second collective, and none on the host.

[Note: Always as many numbers]
All ranks must add the same count of numbers in each step, but after an error one rank may leave a `with` block before
the others. So a part is never removed. After its `with` block it adds zeros.
"""

from collections.abc import Callable, Hashable, Sequence
from weakref import WeakKeyDictionary

from torch import nn

from zeroamp.wrapping.state import WrapState

Receive = Callable[[Sequence[float]], None]
"""Called with the sums over the ranks of the numbers that were returned with it, on a CPU in the same step, on other
devices in the next one: see [Note: One step late] in `zeroamp.training.statistics`."""
Part = Callable[[], tuple[Sequence[float], Receive]]
"""Called before the all-reduce of a step. Returns numbers, equally many on all ranks, and the function that gets their
sums. It must not count its calls as steps, because an error may end the step before there are sums."""

_of_root: "WeakKeyDictionary[nn.Module, StepSums]" = WeakKeyDictionary()


def step_sums_of(state: WrapState) -> "StepSums":
    """Return the `StepSums` that all `TrainStep`s of a model share."""
    return _of_root.setdefault(state.root, StepSums())


class StepSums:
    """The parts that add numbers to the all-reduce of each step."""

    def __init__(self) -> None:
        self.num_sums = 0
        """Steps whose numbers were summed, the same on all ranks."""
        self._parts: dict[Hashable, Part] = {}

    def put(self, key: Hashable, part: Part) -> None:
        """Add a part, or replace the part of the same key. Call this on all ranks between the same two steps."""
        self._parts[key] = part

    def collect(self) -> list[tuple[Sequence[float], Receive]]:
        """Return the numbers of all parts, and the functions that get their sums."""
        return [part() for part in self._parts.values()]

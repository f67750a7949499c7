"""`StepSums`: numbers that features add to the one all-reduce of each optimizer step, and their sums over the ranks.

Preemption, background saves and `RunReport` exchange numbers between the ranks in every step. They add them to the
step's all-reduce, so a step has no second collective, and none on the host.

[Note: One step late]
On a CPU the sums are known at the end of their step. On other devices the host would have to wait for the device, so
the sums of a step are copied to the host and read in the next step. Only the device type decides this, so all ranks
read a sum in the same step.

[Note: Always as many numbers]
All ranks must add the same count of numbers in each step, but after an error one rank may leave a `with` block before
the others. So a part is never removed. After its `with` block it adds zeros.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import nn

from zeroamp.planning.mesh import device_of
from zeroamp.training.callbacks import HostReader
from zeroamp.wrapping.state import WrapState

Receive = Callable[[Sequence[float]], None]
"""Called with the sums over the ranks of the numbers that were returned with it, in the same or in the next step."""
Part = Callable[[], tuple[Sequence[float], Receive]]
"""Called before the all-reduce of a step. Returns numbers, equally many on all ranks, and the function that gets their
sums. It must not count its calls as steps, because an error may end the step before there are sums."""

_of_root: "WeakKeyDictionary[nn.Module, StepSums]" = WeakKeyDictionary()


def step_sums_of(state: WrapState) -> "StepSums":
    """Return the `StepSums` that all `TrainStep`s of a model share."""
    if state.root not in _of_root:
        _of_root[state.root] = StepSums(device_of(state.mesh))
    return _of_root[state.root]


class StepSums(HostReader):
    """Adds the numbers of its parts to the step's all-reduce.

    All other callbacks read their sums first. If one of them raises, the parts get no sums.
    """

    def __init__(self, device: torch.device, *, is_late: bool | None = None) -> None:
        """`device`: where the sums are. `is_late`: whether to read them in the next step. None: unless on a CPU."""
        self.num_sums = 0
        """Steps whose numbers were summed, the same on all ranks."""
        self.is_late = device.type != "cpu" if is_late is None else is_late
        self._parts: dict[Hashable, Part] = {}
        self._collected: list[tuple[int, Receive]] = []  # of this step: how many numbers each part returned

    def __bool__(self) -> bool:
        """Whether there are parts. Without parts, the all-reduce has no numbers of this object."""
        return bool(self._parts)

    def put(self, key: Hashable, part: Part) -> None:
        """Add a part, or replace the part of the same key. Call this on all ranks between the same two steps."""
        self._parts[key] = part

    def statistics(self) -> Sequence[float]:
        """Return the numbers of all parts."""
        collected = [part() for part in self._parts.values()]
        self._collected = [(len(numbers), receive) for numbers, receive in collected]
        return [number for numbers, _ in collected for number in numbers]

    def reader(self) -> Callable[[Sequence[float]], None]:
        """Return a function that passes the sums to the parts: see [Note: One step late]."""
        return partial(_pass_on, self._collected)

    def on_settled(self) -> None:
        """Count the step."""
        self.num_sums += 1


def _pass_on(collected: Sequence[tuple[int, Receive]], sums: Sequence[float]) -> None:
    start = 0
    for count, receive in collected:
        receive(sums[start : start + count])
        start += count

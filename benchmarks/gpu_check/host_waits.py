"""Part 4: how often the host waits for the device in a forward, a backward and a `step()`.

On CUDA torch itself warns of calls that wait (`torch.cuda.set_sync_debug_mode("warn")`). It does not warn of waits for
events: the host reads copies of earlier steps' sums that way. On a CPU nothing waits. So the calls that would wait on
CUDA are counted there: reads of a tensor's value, and ops whose output size depends on values. Reads of such a copy and
reads after the first op of the update do not count.

In float16 the host waits once in each `step()`, for the gradient norm.

On CUDA a profile of one step also shows how long the GPU is idle before the update's first kernel.
"""

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_check import ranks
from benchmarks.gpu_check.faults import planted
from benchmarks.gpu_check.training import Training, zeroamp_training
from benchmarks.gpu_check.verdict import Place, Result
from zeroamp.training import step_report

WARM_UP = 3  # the first steps make the optimizer's state and learn orders
NUM_STEPS = 2
WORLD_SIZE = 8
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2, 2 micro-batches": {"stage": 2, "gradient_accumulation_steps": 2},
    "stage 3": {"stage": 3},
    "stage 3, float16": {"stage": 3, "torch_autocast": {"enabled": True, "dtype": "float16"}},
}
EXPECTED = {("stage 3, float16", "step"): NUM_STEPS}
"""(case, phase) -> waits that are expected; 0 for all others."""
PROFILED = ("stage 3",)
UPDATE = "aten::_fused_adamw_"
_WARNING = "called a synchronizing CUDA operation"
_WAITING = {
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::masked_select"),
    *("aten::_unique2", "aten::unique_dim", "aten::repeat_interleave.Tensor"),
}


def run(place: Place) -> Result:
    """Take optimizer steps in every case, and count the waits in each phase."""
    blind = _blind(place)
    if blind:
        return Result.of([blind], "")
    rows, failures = [], []
    for group, num_ranks in (("alone", 1), (f"one of {WORLD_SIZE}", WORLD_SIZE)):
        for name in CASES:
            with ranks.one_rank(place.device) if num_ranks == 1 else ranks.echoing_ranks(num_ranks):
                phases = waits_of(zeroamp_training(place, **CASES[name]), place)
            row = {"case": name, "ranks": group, **{phase: len(found) for phase, found in phases.items()}}
            rows.append(row | {"where": "; ".join(dict.fromkeys(chain(*phases.values())))})
            failures += [
                f"{name}, {group}: {len(found)} waits in {NUM_STEPS} {phase}s, first at {found[0]}"
                for phase, found in phases.items()
                if len(found) > EXPECTED.get((name, phase), 0)
            ]
    idle = {name: idle_before_update(place, **CASES[name]) for name in PROFILED} if place.on_cuda else {}
    how = "torch.cuda.set_sync_debug_mode" if place.on_cuda else "reads of values before the update"
    return Result.of(
        failures,
        f"0 waits in forward, backward and step of {len(rows)} cases, in float16 1 in each step ({how})"
        + "".join(f"; {name}: GPU idle for {found} before the update" for name, found in idle.items()),
        not_measured="" if place.on_cuda else "what torch.cuda.set_sync_debug_mode sees (no CUDA)",
        values={"idle before the update": idle},
        tables={f"Waits of the host in {NUM_STEPS} steps": rows},
    )


def waits_of(training: Training, place: Place) -> dict[str, list[str]]:
    """Return phase -> the lines of code at which the host waited."""
    for _ in range(WARM_UP):
        training.step()
    place.synchronize()
    found: dict[str, list[str]] = {"forward": [], "backward": [], "step": []}
    for _ in range(NUM_STEPS * training.num_micro_batches):
        with _watch(place, found["forward"]):
            loss = training.forward()
            planted("host read", loss.detach())
        with _watch(place, found["backward"]):
            training.backward(loss)
        with _watch(place, found["step"]):
            planted("host read in step", loss.detach())
            training.update()
    place.synchronize()
    return found


def idle_before_update(place: Place, **config: Any) -> str:
    """Return how long the GPU was idle before the update's first kernel, in the second of two profiled steps."""
    # Only the device's activity: profiling the CPU too would slow the host down.
    activity = getattr(torch.profiler.ProfilerActivity, place.device.type.upper())
    with ranks.one_rank(place.device):
        training = zeroamp_training(place, shape="100m", length=512, **config)
        for _ in range(WARM_UP):
            training.step()
        for _ in range(2):  # in the first one, the profiler itself starts
            place.synchronize()
            with torch.profiler.profile(activities=[activity]) as profiled:
                training.step()
                place.synchronize()
    gap = gap_before_update([event for event in profiled.events() if event.device_type == DeviceType.CUDA])
    return "an unknown time (no kernel of the update in the profile)" if gap is None else f"{gap:.0f} us"


def gap_before_update(kernels: Sequence[Any]) -> float | None:
    """Return the microseconds between the end of all earlier kernels and the update's first kernel; None without one.

    Args:
        kernels: profiled kernels, with `name` and `time_range` in microseconds.
    """
    updates = [kernel.time_range.start for kernel in kernels if "fusedadam" in kernel.name.lower().replace("_", "")]
    if not updates:
        return None
    first = min(updates)
    before = [kernel.time_range.end for kernel in kernels if kernel.time_range.start < first]
    return max(0.0, first - max(before, default=first))


def _blind(place: Place) -> str:
    """Return an error if the method does not count a wait that is there, else an empty string."""
    seen: list[str] = []
    value = torch.ones(1, device=place.device)
    with _watch(place, seen):
        value.item()
    return "" if seen else "a read of a tensor's value was not counted: counts of 0 would mean nothing"


def _watch(place: Place, places: list[str]) -> AbstractContextManager[Any]:
    return _cuda_waits(places) if place.on_cuda else _HostReads(places)


@contextmanager
def _cuda_waits(places: list[str]) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if _WARNING in str(warning.message):
            places.append(f"{_short(warning.filename)}:{warning.lineno}")


class _HostReads(TorchDispatchMode):
    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self._places = places
        self._is_updated = False
        self._methods: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Any:
        # These methods read memory without an op that could be counted.
        for name in ("numpy", "tolist"):
            self._methods[name] = getattr(torch.Tensor, name)
            setattr(torch.Tensor, name, self._noting(self._methods[name]))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for name, method in self._methods.items():
            setattr(torch.Tensor, name, method)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name == UPDATE:
            self._is_updated = True
        elif name in _WAITING or f"{name}.{func._overloadname}" in _WAITING:
            self._note()
        return func(*args, **(kwargs or {}))

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._note()
            return method(tensor, *args, **kwargs)

        return noted

    def _note(self) -> None:
        caller = _caller()
        is_copy = caller is not None and caller.name == "values" and caller.filename == step_report.__file__
        if not self._is_updated and not is_copy:  # `HostCopy.values`
            self._places.append(f"{_short(caller.filename)}:{caller.lineno}" if caller is not None else "torch")


def _caller() -> traceback.FrameSummary | None:
    """Return the innermost frame outside of torch and of this module."""
    ours = [
        f for f in traceback.extract_stack(sys._getframe(1)) if "/torch/" not in f.filename and f.filename != __file__
    ]
    return ours[-1] if ours else None


def _short(filename: str) -> str:
    return "/".join(filename.split("/")[-3:])

"""Makes a `StepRecord` of every step of a `TrainStep`, for monitors and `RunReport`.

[Note: Not waiting]
The device computes loss, norm and times after the host has launched the step. They are copied to the host
asynchronously and read one step later. So on an accelerator a record comes one step late, and the last one at `flush`.
On the CPU it comes at once.
"""

import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from zeroamp.hooks.collectives.traffic import IssuedCollective
from zeroamp.hooks.root_forward import ForwardCall
from zeroamp.hooks.tensors import tensors_in
from zeroamp.planning.mesh import device_of
from zeroamp.policies.dtypes import short_name
from zeroamp.reporting.clock import StepClock
from zeroamp.reporting.exposed_communication import watch_of
from zeroamp.reporting.step_record import GIB, StepRecord
from zeroamp.training.callbacks import Callback, Callbacks, Phase
from zeroamp.training.step_report import StepReport
from zeroamp.wrapping.state import WrapState, wrap_state

if TYPE_CHECKING:
    from zeroamp.training.step import TrainStep

_TOKEN_DTYPES = (torch.int32, torch.int64)
Sink = Callable[[StepRecord], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Numbers that the user gives for each optimizer step. None: unknown."""

    tokens_per_step: int | None = None
    """Over all ranks. None: counted from the inputs of this rank's forwards, times the ranks."""
    flops_per_step: float | None = None
    """Model FLOPs over all ranks."""
    peak_flops: float | None = None
    """Peak FLOP/s of one rank's device."""


class StepRecorder(Callback):
    """Makes a record of every step of a `TrainStep`, while it has sinks. Reads clocks, sizes and shapes only.

    It runs on each rank, and its sinks get the records of that rank in order. A `TrainStep` has at most one recorder:
    see `recorder_of`.
    """

    def __init__(self, state: WrapState, callbacks: Callbacks) -> None:
        self.figures: Figures | None = None
        """Those of the open `RunReport`, if there is one. The records of all sinks contain them."""
        self._sinks: list[Sink] = []
        self._callbacks = callbacks
        self._state = state
        self._num_ranks = state.mesh.size()  # ranks that get different tokens
        self._num_devices = state.axes.whole.size()
        self._device = device_of(state.mesh)
        self._clock = StepClock(self._device.type)
        self._num_tokens: int | None = None  # in the forwards of this step so far, on this rank
        self._traffic: Counter[str] = Counter()
        self._late: Callable[[], StepRecord] | None = None  # reads the record of the step before, on an accelerator
        watch_of(state.root).add(self._clock)
        state.root_forward.add("report", self._around_forward)
        state.listeners.append(self)
        callbacks.append(self)

    def add(self, sink: Sink) -> None:
        """Pass the records of all following steps to `sink`. Waits for the device."""
        self.flush()
        self._sinks.append(sink)

    def remove(self, sink: Sink) -> None:
        """Pass the last record to `sink`, then remove it. Waits for the device. The last one detaches the recorder."""
        self.flush()
        self._sinks.remove(sink)
        if self._sinks:
            return
        self._callbacks.remove(self)
        watch_of(self._state.root).remove(self._clock)
        self._state.root_forward.remove("report", self._around_forward)
        self._state.listeners.remove(self)

    def on_phase_begin(self, phase: Phase) -> None:
        """Begin a part of the step's time."""
        self._clock.enter(phase)

    def on_phase_end(self, _phase: Phase) -> None:
        """End a part of the step's time."""
        self._clock.leave()

    def on_step_discarded(self) -> None:
        """Reset the token count. Time and traffic of the discarded micro-batches count towards the next step."""
        self._num_tokens = None

    def on_step_end(self, report: StepReport) -> None:
        """End the step, and pass on the record that is complete, see [Note: Not waiting]."""
        record = self._end_step(report)
        self.flush()
        self._late = record
        if self._clock.is_immediate:
            self.flush()

    def flush(self) -> None:
        """Pass the last record to the sinks. Waits for the device."""
        late, self._late = self._late, None
        if late is not None:
            record = late()
            for sink in self._sinks:
                sink(record)

    def _around_forward(self, call: ForwardCall) -> AbstractContextManager[None] | None:
        if self._state.step.is_observed or not call.is_outermost or not torch.is_grad_enabled():
            return None
        if (num_tokens := count_tokens(call.args, call.kwargs)) is not None:
            self._num_tokens = (self._num_tokens or 0) + num_tokens
        return self._forward()

    @contextmanager
    def _forward(self) -> Iterator[None]:
        self._clock.enter("forward")
        try:
            yield
        finally:
            self._clock.leave()

    def on_collective(self, issued: IssuedCollective) -> None:
        """Add the bytes of a collective to those of the optimizer step."""
        if not self._state.step.is_observed:
            self._traffic[f"{issued.collective} {short_name(issued.tensor.dtype)}"] += issued.tensor.nbytes

    def _end_step(self, report: StepReport) -> Callable[[], StepRecord]:
        read_values = report.begin_read()  # the clock's last mark comes after the copy
        rates = [
            rate.to("cpu", non_blocking=True) if isinstance(rate, torch.Tensor) else rate for rate in report.lr_values
        ]
        read_split, memory = self._clock.end_step(), _memory(self._device)
        traffic, self._traffic = dict(self._traffic), Counter()
        counted, self._num_tokens = self._num_tokens, None
        figures = self.figures or Figures()
        num_tokens = figures.tokens_per_step
        if num_tokens is None and counted is not None:
            num_tokens = counted * self._num_ranks

        def record() -> StepRecord:
            split = read_split()
            loss, norm = read_values()
            return StepRecord(
                step=report.step,
                loss=loss,
                grad_norm=norm,
                loss_scale=report.loss_scale,
                skipped=report.skipped,
                num_skipped=report.num_skipped,
                is_scale_exhausted=report.is_scale_exhausted,
                lr=tuple(float(rate) for rate in rates),
                **asdict(split),
                **self._rates(figures, num_tokens, split.step_s),
                traffic_bytes=traffic,
                **memory,
            )

        return record

    def _rates(self, figures: Figures, num_tokens: int | None, step_s: float) -> dict[str, Any]:
        flops = None if figures.flops_per_step is None else figures.flops_per_step / (step_s * self._num_devices)
        return {
            "num_tokens": num_tokens,
            "tokens_per_s": None if num_tokens is None else num_tokens / step_s,
            "flops_per_s_per_rank": flops,
            "mfu": None if flops is None or figures.peak_flops is None else flops / figures.peak_flops,
        }


def recorder_of(train: "TrainStep") -> StepRecorder:
    """Return the recorder of a `TrainStep`. Attaches a new one if it has none."""
    return existing_recorder(train) or StepRecorder(wrap_state(train.model), train.callbacks)


def existing_recorder(train: "TrainStep") -> StepRecorder | None:
    """Return the recorder of a `TrainStep`, None if it has none."""
    return next((callback for callback in train.callbacks if isinstance(callback, StepRecorder)), None)


def count_tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of tokens in a forward's arguments: the elements of `input_ids`, padding included.

    Several `input_ids` are summed, each tensor once. Without `input_ids`, the first tensor of two dims or more counts.
    Only int32 and int64 tensors count, at any depth of the arguments. Returns None if there are none.
    """
    named = {id(tensor): tensor for tensor in tensors_in(list(_values_named("input_ids", (dict(kwargs), args))))}
    if sizes := [tensor.numel() for tensor in named.values() if tensor.dtype in _TOKEN_DTYPES]:
        return sum(sizes)
    for tensor in tensors_in((args, dict(kwargs))):
        if tensor.dtype in _TOKEN_DTYPES and tensor.ndim >= 2:
            return tensor.numel()
    return None


def _values_named(name: str, value: Any) -> Iterator[Any]:
    """Yield the items and fields called `name` of all mappings and dataclasses in `value`, at any depth."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {item.name: getattr(value, item.name) for item in fields(value)}
    if isinstance(value, Mapping):
        if name in value:
            yield value[name]
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _values_named(name, item)


def _memory(device: torch.device) -> dict[str, Any]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    host = {"peak_rss_gib": (peak if sys.platform == "darwin" else peak * 1024) / GIB}  # KiB on Linux, bytes on macOS
    if device.type != "cuda":
        return host
    stats = torch.cuda.memory_stats(device)
    return host | {
        "peak_active_gib": stats["active_bytes.all.peak"] / GIB,
        "peak_reserved_gib": stats["reserved_bytes.all.peak"] / GIB,
        "num_alloc_retries": stats["num_alloc_retries"],
    }

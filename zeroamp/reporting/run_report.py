"""`RunReport`: one JSON line per optimizer step.

[Note: Not waiting]
The device computes loss, norm and times after the host has launched the step. They are copied to the host
asynchronously and read one step later. So on an accelerator a record comes one step late, and the last one at `close`.
On the CPU it comes at once.
"""

import json
import logging
import os
import platform
import resource
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TextIO

import torch

from zeroamp.hooks.collectives.traffic import IssuedCollective
from zeroamp.hooks.root_forward import ForwardCall
from zeroamp.hooks.tensors import HostCopy, tensors_in
from zeroamp.planning.mesh import device_of
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import ConfigError, StepError
from zeroamp.rank_group import RankGroup
from zeroamp.reporting.step_clock import StepClock, time_communication
from zeroamp.reporting.step_record import StepRecord
from zeroamp.training.callbacks import Callback, Phase
from zeroamp.training.step import TrainStep, step_of
from zeroamp.training.step_report import StepReport
from zeroamp.version import __version__
from zeroamp.wrapping.state import WrapState, wrap_state

logger = logging.getLogger("zeroamp")

_GIB = 1024**3


class RunReport(Callback):
    """Writes a record of every step of a `TrainStep` to a file. Results do not change.

    All ranks construct it; the first one writes. If the file exists, it is appended to: see `read_run`. A model has at
    most one open RunReport.

    Examples:
        >>> model = zeroamp.wrap_model(nn.Linear(8, 1), zeroamp.policy_from_config({}))
        >>> train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with zeroamp.RunReport(train, f"{folder}/run.jsonl") as run:
        ...     for _ in range(3):
        ...         train.backward(model(torch.ones(4, 8)).square().mean())
        ...         report = train.step()
        >>> run.last.step
        3
    """

    def __init__(
        self,
        train: "TrainStep",
        path: str | os.PathLike[str],
        *,
        tokens_per_step: int | None = None,
    ) -> None:
        """Attach to `train`, between two optimizer steps.

        Args:
            train: the step to watch.
            path: the file, usually `.jsonl`. Its folder is created.
            tokens_per_step: tokens of one optimizer step over all ranks. None: the tokens in the inputs of the first
                rank's forwards (`count_tokens`), times the number of ranks; of a `PipelineStep` they are not known.

        Raises:
            StepError: on all ranks, an optimizer step of `train` has begun, or another RunReport is open on the model.
            ConfigError: on all ranks, the file cannot be written.
        """
        self.last: StepRecord | None = None
        """This rank's newest record. On an accelerator it is one step behind until `close`."""
        self._tokens_per_step = tokens_per_step
        self._state = state = wrap_state(train.model)
        self._device = device_of(state.mesh)
        self._file: TextIO | None = None  # the first rank's, until a write fails
        ranks = RankGroup.shared(state.axes.whole, "signals")
        ranks.run(lambda: _check_is_possible(train, state))
        ranks.on_first(lambda: self._open(Path(path), train.optimizers))

        self._num_tokens: int | None = None  # in the forwards of this step so far, on this rank
        self._traffic: Counter[str] = Counter()
        self._is_read_late = self._device.type != "cpu"
        self._late: Callable[[], StepRecord] | None = None  # reads the record of the step that ended last
        self._clock = StepClock(self._device.type)
        self._restore = time_communication(state.root, self._clock)
        state.root_forward.add("report", self._around_forward)
        state.listeners.append(self)
        self._callbacks = train.callbacks
        self._callbacks.append(self)
        self._is_open = True
        # Runs when the TrainStep is deleted or the process exits.
        self._finalizer = weakref.finalize(train, self.close)

    def __enter__(self) -> Self:
        """Return the report itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the report."""
        self.close()

    def close(self) -> None:
        """Write the last record and stop recording, on this rank only. Waits for its device.

        Called automatically when the `TrainStep` is deleted or the process exits.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._finalizer.detach()  # it holds a reference to this report
        self._flush()
        self._restore()
        self._state.root_forward.remove("report", self._around_forward)
        self._state.listeners.remove(self)
        self._callbacks.remove(self)
        if self._file is not None:
            self._file.close()

    def on_phase_begin(self, phase: Phase) -> None:
        """Begin a part of the step's time."""
        self._clock.begin(phase)

    def on_phase_end(self, _phase: Phase) -> None:
        """End a part of the step's time."""
        self._clock.begin("other")

    def on_step_discarded(self) -> None:
        """Reset the token count. Time and traffic of the discarded micro-batches count towards the next step."""
        self._num_tokens = None

    def on_collective(self, issued: IssuedCollective) -> None:
        """Add the bytes of a collective to those of the optimizer step."""
        if not self._state.step.is_observed:
            self._traffic[f"{issued.collective} {short_name(issued.tensor.dtype)}"] += issued.tensor.nbytes

    def on_step_end(self, report: StepReport) -> None:
        """End the step, and write the record that is complete, see [Note: Not waiting]."""
        record = self._end_step(report)
        self._flush()
        self._late = record
        if not self._is_read_late:
            self._flush()

    def _around_forward(self, call: ForwardCall) -> AbstractContextManager[None] | None:
        if self._state.step.is_observed or not call.is_outermost or not torch.is_grad_enabled():
            return None
        # Before its first micro-batch, a pipeline schedule runs a forward that finds shapes.
        is_counted = not self._state.axes.is_joined
        if is_counted and (num_tokens := count_tokens(call.args, call.kwargs)) is not None:
            self._num_tokens = (self._num_tokens or 0) + num_tokens
        return self._clock.inside("forward")

    def _end_step(self, report: StepReport) -> Callable[[], StepRecord]:
        values = HostCopy(torch.stack([report.loss_tensor.double(), report.grad_norm_tensor.double()]))
        rates = [
            rate.to("cpu", non_blocking=True) if isinstance(rate, torch.Tensor) else rate for rate in report.lr_values
        ]
        read_seconds, memory = self._clock.end_step(), _memory(self._device)  # its last mark comes after the copy
        traffic, self._traffic = dict(self._traffic), Counter()
        num_tokens, self._num_tokens = self._num_tokens, None
        if num_tokens is not None:
            num_tokens *= self._state.mesh.size()  # ranks that get different tokens
        num_tokens = num_tokens if self._tokens_per_step is None else self._tokens_per_step

        def record() -> StepRecord:
            seconds = read_seconds()  # waits for the device: the copies before are complete
            loss, norm = values.values()
            step_s = sum(seconds.values())
            times = {f"{part}_s": value for part, value in seconds.items() if part != "other"}
            return StepRecord(
                step=report.step,
                loss=loss,
                grad_norm=norm,
                loss_scale=report.loss_scale,
                skipped=report.skipped,
                num_skipped=report.num_skipped,
                lr=tuple(float(rate) for rate in rates),
                step_s=step_s,
                num_tokens=num_tokens,
                tokens_per_s=None if num_tokens is None else num_tokens / step_s,
                traffic_bytes=traffic,
                **times | memory,
            )

        return record

    def _flush(self) -> None:
        """Write the last record. Waits for the device."""
        late, self._late = self._late, None
        if late is None:
            return
        self.last = late()
        self._write(self.last.to_json())

    def _open(self, path: Path, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8", newline="")
        except OSError as error:
            raise ConfigError(
                f"RunReport(path=): {path} cannot be written ({error.strerror}). Name another file."
            ) from error
        if self._file.tell():
            self._file.write("\n")  # a crash may have cut the last line
        self._write(_header(self._state, optimizers))

    def _write(self, line: dict[str, Any]) -> None:
        """Append a line. Existing lines never change: a resumed run appends a header and its steps."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        except (OSError, ValueError) as error:
            file, self._file = self._file, None
            with suppress(OSError):
                file.close()
            why = f"{type(error).__name__}: {error}"
            logger.error("RunReport writes nothing more to %s, because of %s. Training continues", file.name, why)


def count_tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of tokens in a forward's arguments: the elements of `input_ids`, padding included.

    Without the keyword `input_ids`, the first int32 or int64 tensor of two dims or more counts, at any depth of the
    arguments. Returns None if there is none.
    """
    if isinstance(ids := kwargs.get("input_ids"), torch.Tensor):
        return ids.numel()
    for tensor in tensors_in((args, dict(kwargs))):
        if tensor.dtype in (torch.int32, torch.int64) and tensor.ndim >= 2:
            return tensor.numel()
    return None


def _check_is_possible(train: "TrainStep", state: WrapState) -> None:
    if not step_of(train).is_between_steps:
        raise StepError(
            "RunReport must be constructed between two optimizer steps, but a backward of this TrainStep has begun. "
            "Construct it after step() returned a report."
        )
    if any(isinstance(each, RunReport) for each in state.listeners):
        raise StepError(
            "Another RunReport is open on this model, which can have one at a time. Close the other one first, or "
            "read its file while it grows."
        )


def _header(state: WrapState, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    policy, device = state.plan.policy, device_of(state.mesh)
    return {
        "kind": "header",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"zeroamp": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "world_size": state.axes.whole.size(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "config": policy.to_config(),
        "optimizers": {str(index): _settings(optimizer) for index, optimizer in enumerate(optimizers)},
        "plan": {"mode": policy.mode, "stage": policy.stage, "mesh": list(state.mesh.shape)},
    }


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the class and the arguments of an optimizer, those that are numbers or texts."""
    plain = {name: value for name, value in optimizer.defaults.items() if isinstance(value, bool | int | float | str)}
    betas = {f"betas.{index}": beta for index, beta in enumerate(optimizer.defaults.get("betas", ()))}
    return {"type": type(optimizer).__name__} | {name: str(value) for name, value in {**plain, **betas}.items()}


def _memory(device: torch.device) -> dict[str, Any]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    host = {"peak_rss_gib": (peak if sys.platform == "darwin" else peak * 1024) / _GIB}  # KiB on Linux, bytes on macOS
    if device.type != "cuda":
        return host
    stats = torch.cuda.memory_stats(device)
    return host | {
        "peak_active_gib": stats["active_bytes.all.peak"] / _GIB,
        "peak_reserved_gib": stats["reserved_bytes.all.peak"] / _GIB,
        "num_alloc_retries": stats["num_alloc_retries"],
    }

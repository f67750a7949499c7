"""`zeroamp.Profile`: runs torch's profiler on some optimizer steps, and writes a trace per rank with labels."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from zeroamp.hooks.observers.trace_labels import LABEL_PREFIX, label_forwards
from zeroamp.policies.errors import StepError
from zeroamp.reporting.tables import Row, render
from zeroamp.training.callbacks import Callback
from zeroamp.training.step import TrainStep, on_new_train_step
from zeroamp.training.step_report import StepReport
from zeroamp.wrapping.state import wrap_state


class Profile(Callback):
    """A context that profiles optimizer steps of a `TrainStep`, and writes a trace per rank into a folder.

    ```python
    with zeroamp.Profile(train, "traces") as profile:
        for batch in loader:
            train.backward(model(batch))
            train.step()
    print(profile)  # the labels, with calls and times
    ```

    All ranks enter it, and leave it after the same steps. Open the files (`rank0.json`, …) in chrome://tracing or
    ui.perfetto.dev. Those of an earlier run are replaced. Each rank writes its file at the end of the last active step.
    """

    def __init__(
        self,
        train: TrainStep | None,
        folder: str | os.PathLike[str],
        *,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
    ) -> None:
        """Prepare the profiler.

        Args:
            train: the `TrainStep` to profile. A call of `step()` counts if it returns a `StepReport`. None: the first
                `TrainStep` that is made inside the context.
            folder: created if it is missing.
            wait: steps before the profiler starts. They cost nothing.
            warmup: steps whose events are discarded: the first profiled steps are slow.
            active: steps to record. Fewer are recorded if the context ends before.
        """
        self.folder: Path = Path(folder)
        self.path: Path | None = None
        """This rank's trace, once it is written."""
        self.times: list[Row] = []
        """This rank's labels, the longest total first, once the trace is written. `str` returns them as a table."""
        self.rank: int = 0
        """This process's rank. 0 until the model is known."""
        self._train = train
        self._num_before = wait + warmup
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._write,
        )
        self._contexts = ExitStack()

    def __enter__(self) -> Self:
        """Start to count steps."""
        if self._train is None:
            on_new_train_step.append(self._attach)
            self._contexts.callback(on_new_train_step.remove, self._attach)
        else:
            self._attach(self._train)
        self._profiler.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Write the trace, if the steps ended early. After an error nothing is written: other ranks may still train.

        Raises:
            StepError: no step was recorded, or the trace cannot be written.
        """
        num_steps = self._profiler.step_num
        has_recorded = num_steps > self._num_before
        if error_type is not None or not has_recorded:
            self._profiler.on_trace_ready = None
        with self._contexts:
            self._profiler.stop()
        if error_type is None and self._train is None:
            raise StepError(
                "Profile recorded nothing, because no TrainStep was made inside it, and it counts the steps of one. "
                "Make a TrainStep, or profile a loop without one by torch.profiler."
            )
        if error_type is None and not has_recorded:
            raise StepError(
                f"Profile recorded nothing: it ended after {num_steps} optimizer steps of a TrainStep, but it records "
                f"from step {self._num_before + 1} on. Run more steps inside it, or lower wait and warmup."
            )

    def __str__(self) -> str:
        """Return the labels of this rank with their calls and times as a table."""
        return render(self.times)

    def on_step_end(self, _report: StepReport) -> None:
        """Record a step. After the last one the profiler calls `_write`."""
        self._profiler.step()

    def _attach(self, train: TrainStep) -> None:
        if self._train not in (None, train):
            return
        self._train, self.rank = train, dist.get_rank()
        state = wrap_state(train.model)
        state.callbacks.append(self)
        self._contexts.callback(state.callbacks.remove, self)
        for fqn, module in state.units.items():
            for handle in label_forwards(module, fqn):
                self._contexts.callback(handle.remove)

    def _write(self, _profiler: torch.profiler.profile) -> None:
        path = self.folder / f"rank{self.rank}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.touch()  # torch logs an error where a file cannot be written, and raises none
            self._profiler.export_chrome_trace(str(path))
        except OSError as error:
            what = f"{type(error).__name__}: {error}"
            raise StepError(f"Profile cannot write {path}: {what}. Name another folder.") from error
        self.path, self.times = path, _label_times(self._profiler.key_averages())


def _label_times(averages: Any) -> list[Row]:
    """Return the calls and times of zeroamp's labels. Device time is from the first to the last kernel of each."""
    labels = [each for each in averages if each.key.startswith(LABEL_PREFIX)]
    on_host = [each for each in labels if each.device_type.name == "CPU"]
    device_us = {each.key: each.device_time_total for each in labels if each not in on_host}
    return [
        {
            "label": each.key,
            "calls": each.count,
            "total ms": each.cpu_time_total / 1e3,
            "mean ms": each.cpu_time_total / 1e3 / each.count,
            **({"device ms": device_us.get(each.key, 0.0) / 1e3} if device_us else {}),
        }
        for each in sorted(on_host, key=lambda each: -each.cpu_time_total)
    ]

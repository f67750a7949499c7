"""`zeroamp.Profile`: runs torch's profiler on some optimizer steps, and writes a trace per rank with labels."""

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from zeroamp.hooks.observers.forward_labels import label_forwards
from zeroamp.hooks.observers.trace_labels import LABEL_PREFIX
from zeroamp.policies.errors import StepError
from zeroamp.rank_group import signals_of
from zeroamp.reporting.tables import Row, render
from zeroamp.training.callbacks import Callback, on_new_train_step
from zeroamp.training.step import TrainStep
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
        compress: bool = False,
    ) -> None:
        """Prepare the profiler.

        Args:
            train: the `TrainStep` to profile. A call of `step()` counts if it returns a `StepReport`. None: the first
                `TrainStep` that is made inside the context.
            folder: created if it is missing.
            wait: steps before the profiler starts. They cost nothing.
            warmup: steps, at least 1, whose events are discarded: the first profiled steps are slow.
            active: steps to record, at least 1. Fewer are recorded if the context ends before.
            compress: write `rank0.json.gz`.
        """
        if not (wait >= 0 and warmup >= 1 and active >= 1):
            raise StepError(
                f"Profile records after wait={wait} and warmup={warmup} optimizer steps the next active={active}. wait "
                "must be at least 0, warmup and active at least 1. Change them."
            )
        self.folder, self._suffix = Path(folder), ".json.gz" if compress else ".json"
        self.path: Path | None = None
        """This rank's trace, once it is written."""
        self.times: list[Row] = []
        """This rank's labels, the longest total first, once the trace is written. `str` returns them as a table."""
        self.rank = 0
        """This process's rank. 0 until the model is known."""
        self._root = None if train is None else wrap_state(train.model).root
        self._num_before = wait + warmup
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._write_on_all,
        )
        self._contexts = ExitStack()

    def __enter__(self) -> Self:
        """Start to count steps."""
        if self._root is None:
            on_new_train_step.append(self._attach)
            self._contexts.callback(on_new_train_step.remove, self._attach)
        else:
            self._follow(self._root)
        self._profiler.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """Write the trace, if the steps ended early. After an error nothing is written: other ranks may still train.

        Raises:
            StepError: on all ranks, if no step was recorded or a rank cannot write.
        """
        num_steps = self._profiler.step_num
        if error_type is not None or num_steps <= self._num_before:
            self._profiler.on_trace_ready = None
        with self._contexts:
            self._profiler.stop()
        if error_type is None and num_steps <= self._num_before:
            raise StepError(
                f"Profile recorded nothing: it ended after {num_steps} optimizer steps of a TrainStep, but it records "
                f"from step {self._num_before + 1} on. Run more steps inside it, or lower wait and warmup."
            )

    def __str__(self) -> str:
        """Return the labels of this rank with their calls and times as a table."""
        return render(self.times)

    def on_step_end(self, _report: StepReport) -> None:
        """Record a step. After the last one the profiler calls `_write_on_all`."""
        self._profiler.step()

    def _attach(self, train: TrainStep) -> None:
        if self._root is None:
            self._follow(wrap_state(train.model).root)

    def _follow(self, root: nn.Module) -> None:
        self._root, self.rank = root, dist.get_rank()
        state = wrap_state(root)
        state.callbacks.append(self)
        self._contexts.callback(state.callbacks.remove, self)
        for fqn, module in state.units.items():
            for handle in label_forwards(module, fqn):
                self._contexts.callback(handle.remove)

    def _write_on_all(self, _profiler: torch.profiler.profile) -> None:
        if self._root is not None and dist.is_initialized():
            signals_of(wrap_state(self._root)).run(self._write)
        else:  # the script destroyed its process group before the last step to record
            self._write()

    def _write(self) -> None:
        path = self.folder / f"rank{self.rank}{self._suffix}"
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
            "total_ms": each.cpu_time_total / 1e3,
            "mean_ms": each.cpu_time_total / 1e3 / each.count,
            **({"device_ms": device_us.get(each.key, 0.0) / 1e3} if device_us else {}),
        }
        for each in sorted(on_host, key=lambda each: -each.cpu_time_total)
    ]

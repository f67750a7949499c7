"""`zeroamp.profile`: runs torch's profiler on some optimizer steps, and writes a trace per rank with labels."""

import gzip
import json
import os
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import nn

from zeroamp.hooks.observers.trace_labels import label_forwards
from zeroamp.policies.errors import StepError, describe
from zeroamp.policies.numbers import is_integer
from zeroamp.rank_group import signals_of
from zeroamp.reporting.chrome_trace import LabelTimes, label_times, render_times
from zeroamp.reporting.files import check_folder
from zeroamp.training.callbacks import Callback, on_new_train_step
from zeroamp.training.step import TrainStep
from zeroamp.training.step_report import StepReport
from zeroamp.wrapping.state import wrap_state


class Profile(Callback):
    """A context that profiles some of the optimizer steps inside it, and writes one trace per rank.

    All ranks enter it, and leave it after the same steps. `str(profile)` is a table of the labels and their times.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        compress: bool = False,
        root: nn.Module | None = None,
    ) -> None:
        """See `profile`. `root` is the wrapped model to profile. None: the model of the first optimizer step."""
        for name, value, least in (("wait", wait, 0), ("warmup", warmup, 1), ("active", active, 1)):
            if not is_integer(value, at_least=least):
                where = f"profile(..., {name}=)"
                remedy = "It is a number of optimizer steps."
                raise StepError(describe(where, repr(value), f"an integer >= {least}", remedy))
        self.folder = Path(folder)
        self.path: Path | None = None
        """This rank's trace, once it is written."""
        self.times: list[LabelTimes] = []
        """This rank's labels, once the trace is written."""
        self.num_steps = 0
        """Optimizer steps since the context was entered, until the trace is written."""
        self.rank = 0
        """This process's rank. 0 until the model is known."""
        self._num_before, self._num_steps_wanted = wait + warmup, wait + warmup + active
        self._compress = compress
        self._root = root
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1)
        )
        self._contexts = ExitStack()

    def __enter__(self) -> Self:
        """Start to count steps.

        Raises:
            StepError: the folder cannot be written. Raised on all ranks if the model is known.
        """
        if self._root is None:  # the command enters before the script begins: there may be no process group yet
            self._check_folder()
            on_new_train_step.append(self._attach)
            self._contexts.callback(on_new_train_step.remove, self._attach)
        else:
            signals_of(wrap_state(self._root)).run(self._check_folder)
            self._follow(self._root)
        self._contexts.enter_context(self._profiler)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        """Write the trace, if the steps ended early. After an error nothing is written: other ranks may still train.

        Raises:
            StepError: on all ranks, if no step was recorded or a rank cannot write.
        """
        self._contexts.close()
        if error_type is not None or self.path is not None:
            return
        if self.num_steps <= self._num_before:
            raise StepError(
                f"profile recorded nothing: it ended after {self.num_steps} optimizer steps of a TrainStep, but it "
                f"records from step {self._num_before + 1} on. Run more steps inside it, or lower wait and warmup."
            )
        self._write_on_all()

    def __str__(self) -> str:
        """Return the labels of this rank and their times as a table, the longest total first."""
        return render_times(self.times)

    def _attach(self, train: TrainStep) -> None:
        """Follow the first model of the script."""
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

    def on_step_end(self, _report: StepReport) -> None:
        """Record a step, and write the trace after the last one."""
        if self.path is not None:
            return
        self.num_steps += 1
        with warnings.catch_warnings():
            # torch up to 2.12 warns that a second cycle clears the events of the first. Here is only one cycle.
            warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
            self._profiler.step()
        if self.num_steps == self._num_steps_wanted:
            self._write_on_all()

    def _write_on_all(self) -> None:
        if self._root is None:
            raise AssertionError("expected a model that made steps, got none")
        if dist.is_initialized():
            signals_of(wrap_state(self._root)).run(self._write)
        else:  # the script destroyed its process group before the last step to record
            self._write()

    def _write(self) -> None:
        """Write this rank's trace to a draft, then rename it, so that a file under the final name is complete."""
        name = f"rank{self.rank}.json{'.gz' if self._compress else ''}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder) as draft:
                exported = Path(draft) / "exported.json"
                self._profiler.export_chrome_trace(str(exported))
                trace = json.loads(exported.read_bytes())
                with (gzip.open if self._compress else open)(Path(draft) / name, "wt", encoding="utf-8") as file:
                    file.write(json.dumps(trace))  # dump() would write it piece by piece, much slower
                os.replace(Path(draft) / name, self.folder / name)
        except OSError as error:
            raise self._unwritable(error) from error
        self.path = self.folder / name
        self.times = label_times(trace["traceEvents"])

    def _check_folder(self) -> None:
        try:
            check_folder(self.folder)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> StepError:
        return StepError(
            f"profile cannot write to the folder {self.folder}: {type(error).__name__}: {error}. Name another folder."
        )


def profile(
    train: TrainStep,
    folder: str | os.PathLike[str],
    wait: int = 1,
    warmup: int = 1,
    active: int = 3,
    *,
    compress: bool = False,
) -> Profile:
    """Return a context that profiles optimizer steps of `train` and writes a trace per rank into `folder`.

    ```python
    with zeroamp.profile(train, "traces") as profile:
        for batch in loader:
            train.backward(model(batch))
            train.step()
    print(profile)  # the labels, with calls and times
    ```

    Open the files (`rank0.json`, …) in chrome://tracing or ui.perfetto.dev. Those of an earlier run are replaced. Each
    rank writes its file at the end of the last active step; the whole trace must fit in host memory then.

    Args:
        train: the `TrainStep` to profile. A call of `step()` counts if it returns a `StepReport`.
        folder: created if it is missing.
        wait: steps before the profiler starts. They cost nothing.
        warmup: steps, at least 1, whose events are discarded: the first profiled steps are slow.
        active: steps to record, at least 1. Fewer are recorded if the context ends before.
        compress: write `rank0.json.gz`.

    Raises:
        StepError: a count is not an integer or too small; on entering or later, a rank cannot write; on leaving, no
            step was recorded.
        WrapError: the model of `train` is not wrapped.
    """
    root = wrap_state(train.model).root
    return Profile(folder, wait=wait, warmup=warmup, active=active, compress=compress, root=root)

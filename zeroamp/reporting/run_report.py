"""`RunReport`: one JSON line per optimizer step, warnings, and a progress line."""

import os
import platform
import weakref
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Self

import torch

from zeroamp.planning.mesh import device_of, shard_size
from zeroamp.policies.errors import StepError, describe
from zeroamp.policies.numbers import is_finite
from zeroamp.reporting.run_warnings import RunWarnings
from zeroamp.reporting.step_record import StepRecord
from zeroamp.reporting.step_recorder import Figures, existing_recorder, recorder_of
from zeroamp.reporting.writers import JsonlWriter, ProgressLine, Writers
from zeroamp.version import __version__
from zeroamp.wrapping.state import WrapState, signals_of, wrap_state

if TYPE_CHECKING:
    from zeroamp.training.step import TrainStep

FORMAT = 1
"""Of the file. Readers skip lines and fields that they do not know."""
STEPS_PER_CHECK = 50
"""Steps between two exchanges of the ranks' busy times."""


class RunReport:
    """Records every step of a `TrainStep` in a file, warns, and shows progress. Training has the same bits with it.

    ```python
    with zeroamp.RunReport(train, "runs/a.jsonl", num_steps=1000) as run:
        for batch in loader:
            train.backward(model(**batch).loss)
            train.step()
            run.last  # the newest StepRecord
    ```

    All ranks construct it; the first one writes. If the file exists, it is appended to: see `read_run`.

    A `TrainStep` has one at a time. While it is open, its figures (tokens, FLOPs) are in what monitors write, too.
    """

    def __init__(
        self,
        train: "TrainStep",
        path: str | os.PathLike[str],
        *,
        tokens_per_step: int | None = None,
        flops_per_step: float | None = None,
        peak_flops: float | None = None,
        num_steps: int | None = None,
        steps_per_check: int = STEPS_PER_CHECK,
    ) -> None:
        """Attach to `train`, between two optimizer steps.

        Args:
            train: the step to watch.
            path: the file, `.jsonl` by custom. Its folder is made.
            tokens_per_step: tokens of one optimizer step, of all ranks. None: counted from the inputs of the first
                rank's forwards (`count_tokens`), times the ranks.
            flops_per_step: model FLOPs of one optimizer step, of all ranks, as `count_flops` x micro-batches x ranks.
            peak_flops: peak FLOP/s of one rank's device in the dtype that computes, by its data sheet. With
                `flops_per_step`: MFU = flops_per_step / (step_s x ranks x peak_flops).
            num_steps: shows a line of progress towards so many optimizer steps. None: none.
            steps_per_check: steps between two exchanges of busy times and allocator flushes among the ranks, one small
                message over the CPU each. 0: none, and no warnings of them.

        Raises:
            StepError: a number is not positive and finite; on all ranks, an optimizer step of `train` has begun, or
                another RunReport is open on it.
            ConfigError: on all ranks, the file cannot be written, or the progress line needs tqdm.
        """
        figures = Figures(tokens_per_step=tokens_per_step, flops_per_step=flops_per_step, peak_flops=peak_flops)
        given = {**asdict(figures), "num_steps": num_steps, "steps_per_check": steps_per_check or None}
        for name, value in given.items():
            if value is not None and not is_finite(value, above=0):
                where, valid = f"RunReport({name}=)", "a positive, finite number, or None"
                raise StepError(describe(where, value, valid, "Change it."))
        state = wrap_state(train.model)
        self.last: StepRecord | None = None
        """The newest record of this rank. On an accelerator that of the step before the last, until `close`."""
        self._ranks = signals_of(state)
        self._writers = Writers()
        self._warnings = RunWarnings(state.plan, shard_size(state.mesh), state.mesh.size())
        self._ranks.run(lambda: _check_is_possible(train))
        self._ranks.on_first(lambda: self._open(Path(path), num_steps, _header(state, figures)))
        warnings = self._warnings if self._ranks.rank == 0 else None
        self._check = _RankCheck(self._ranks.run, warnings, steps_per_check) if steps_per_check else None
        self._recorder = recorder_of(train)
        self._recorder.add(self._record)
        self._recorder.figures = figures
        self._is_open = True
        # With the TrainStep, and at the end of the process at the latest.
        self._finalizer = weakref.finalize(train, self.close)

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Write what is left, and record no more. On this rank only; waits for its device.

        Called at the end of the `TrainStep`, or of the process, if nobody did before.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._finalizer.detach()  # which keeps this alive
        self._check = None  # an exchange is for all ranks, and this one may be leaving alone, after an error
        self._recorder.remove(self._record)
        self._recorder.figures = None
        self._writers.close()

    def _open(self, path: Path, num_steps: int | None, header: dict[str, Any]) -> None:
        self._writers.add(JsonlWriter(path, header))
        if num_steps is not None:
            self._writers.add(ProgressLine(num_steps))
        self._warnings.listeners.append(self._writers.warning)
        self._warnings.look_at_plan()

    def _record(self, record: StepRecord) -> None:
        self.last = record
        self._writers.step(record)
        if self._ranks.rank == 0:
            self._warnings.step(record)
        if self._check is not None:
            self._check.step(record)


class _RankCheck:
    """Exchanges the ranks' busy times and allocator flushes every so many steps, on the group of the CPU's flags.

    Each rank's median: one hiccup makes no slow rank. The first step is left out, which allocates and compiles.
    """

    def __init__(self, exchange: Callable[..., list[Any]], warnings: RunWarnings | None, every: int) -> None:
        self._exchange = exchange
        self._warnings = warnings
        self._every = every
        self._busy_s: list[float] = []
        self._num_flushes: int | None = None  # of the process, at the last exchange; None before the first step

    def step(self, record: StepRecord) -> None:
        """Take one step in; at every so-many-th exchange. The same step on all ranks, which had as many records."""
        flushes = record.num_alloc_retries or 0
        if self._num_flushes is None:
            self._num_flushes = flushes
            return
        self._busy_s.append(record.busy_s)
        if len(self._busy_s) < self._every:
            return
        mine = median(self._busy_s), flushes - self._num_flushes
        self._busy_s, self._num_flushes = [], flushes
        busy_s, num_flushes = zip(*self._exchange(lambda: mine), strict=True)
        if self._warnings is not None:
            self._warnings.look_at_ranks(busy_s, num_flushes, self._every)


def _check_is_possible(train: "TrainStep") -> None:
    if not train.is_between_steps:
        raise StepError(
            "RunReport must be constructed between two optimizer steps, but a backward of this TrainStep has begun. "
            "Construct it after step() returned a report."
        )
    recorder = existing_recorder(train)
    if recorder is not None and recorder.figures is not None:
        raise StepError(
            "RunReport was constructed while another RunReport is open on this TrainStep, which has one at a time. "
            "Close the other one first, or read its file while it grows."
        )


def _header(state: WrapState, figures: Figures) -> dict[str, Any]:
    plan, device = state.plan, device_of(state.mesh)
    return {
        "format": FORMAT,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"zeroamp": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "world_size": state.mesh.size(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "config": plan.policy.to_config(),
        "plan": {
            "mode": plan.policy.mode,
            "stage": plan.policy.stage,
            "mesh": list(state.mesh.shape),
            "num_units": len(plan.units),
            "num_groups": len(plan.groups),
            "num_parameters": sum(param.numel for param in plan.params),
        },
        "tokens": "given" if figures.tokens_per_step is not None else "counted on the first rank, times the ranks",
        "flops_per_step": figures.flops_per_step,
        "peak_flops": figures.peak_flops,
    }

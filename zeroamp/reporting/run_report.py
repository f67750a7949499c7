"""`RunReport`: one JSON line per optimizer step, and warnings."""

import os
import platform
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch

from zeroamp.planning.mesh import device_of
from zeroamp.policies.errors import StepError, describe
from zeroamp.policies.numbers import is_finite
from zeroamp.rank_group import signals_of
from zeroamp.reporting.run_warnings import RunWarnings
from zeroamp.reporting.step_record import StepRecord
from zeroamp.reporting.step_recorder import Figures, existing_recorder, recorder_of
from zeroamp.reporting.writers import JsonlWriter, Writers
from zeroamp.training.callbacks import Callback, Receive
from zeroamp.training.step import TrainStep, driver_of
from zeroamp.version import __version__
from zeroamp.wrapping.state import WrapState, wrap_state

FORMAT = 1
"""Version of the file format. Readers skip lines and fields that they do not know."""
STEPS_PER_CHECK = 50
"""Steps between two exchanges of the ranks' busy times."""


class RunReport:
    """Writes a record of every step of a `TrainStep` to a file, and warns. Results do not change.

    ```python
    with zeroamp.RunReport(train, "runs/a.jsonl") as run:
        for batch in loader:
            train.backward(model(**batch).loss)
            train.step()
            run.last  # the newest StepRecord
    ```

    All ranks construct it; the first one writes. If the file exists, it is appended to: see `read_run`.

    A `TrainStep` has at most one open RunReport. While it is open, monitors write its tokens and FLOPs too.

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
        flops_per_step: float | None = None,
        peak_flops: float | None = None,
        steps_per_check: int = STEPS_PER_CHECK,
    ) -> None:
        """Attach to `train`, between two optimizer steps.

        Args:
            train: the step to watch.
            path: the file, usually `.jsonl`. Its folder is created.
            tokens_per_step: tokens of one optimizer step over all ranks. None: the tokens in the inputs of the first
                rank's forwards (`count_tokens`), times the number of ranks.
            flops_per_step: model FLOPs of one optimizer step over all ranks: `count_flops` x micro-batches x ranks.
            peak_flops: peak FLOP/s of one rank's device in the compute dtype, by its data sheet. With
                `flops_per_step`: MFU = flops_per_step / (step_s x ranks x peak_flops).
            steps_per_check: steps between two exchanges of the ranks' busy times and allocator flushes, two numbers
                per rank in the all-reduce of that step. 0: no exchange, and no warnings about either.

        Raises:
            StepError: a number is not positive and finite; on all ranks, an optimizer step of `train` has begun, or
                another RunReport is open on it.
            ConfigError: on all ranks, the file cannot be written.
        """
        figures = Figures(tokens_per_step=tokens_per_step, flops_per_step=flops_per_step, peak_flops=peak_flops)
        given = {**asdict(figures), "steps_per_check": steps_per_check or None}
        for name, value in given.items():
            if value is not None and not is_finite(value, above=0):
                where, valid = f"RunReport({name}=)", "a positive, finite number, or None"
                raise StepError(describe(where, value, valid, "Change it."))
        state = wrap_state(train.model)
        self.last: StepRecord | None = None
        """This rank's newest record. On an accelerator it is one step behind until `close`."""
        self._ranks = signals_of(state)
        self._writers = Writers()
        self._warnings = RunWarnings(state.plan.policy, self._writers.warning)
        self._ranks.run(lambda: _check_is_possible(train))
        self._ranks.on_first(lambda: self._writers.add(JsonlWriter(Path(path), _header(state, figures))))
        warnings = self._warnings if self._ranks.rank == 0 else None
        self._check = None
        if steps_per_check:
            self._check = _RankCheck(self._ranks.rank, self._ranks.num_ranks, warnings, steps_per_check)
            closed = [each for each in train.callbacks if isinstance(each, _RankCheck)]
            for each in closed:
                train.callbacks.remove(each)
            train.callbacks.append(self._check)
        self._recorder = recorder_of(train)
        self._recorder.add(self._record)
        self._recorder.figures = figures
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
        if self._check is not None:
            self._check.close()  # it still sends zeros: after an error this rank may close alone
        self._recorder.remove(self._record)
        self._recorder.figures = None
        self._writers.close()

    def _record(self, record: StepRecord) -> None:
        self.last = record
        self._writers.step(record)
        if self._ranks.rank == 0:
            self._warnings.step(record)
        if self._check is not None:
            self._check.step(record)


class _RankCheck(Callback):
    """Exchanges the ranks' busy times and allocator flushes every `every` steps, in the all-reduce of that step.

    Each rank sends its median, so that one slow step does not make a slow rank. The first step, which allocates and
    compiles, is left out. Each rank puts its numbers at its own index among zeros, so the sum has those of all ranks.
    """

    def __init__(self, rank: int, num_ranks: int, warnings: RunWarnings | None, every: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._warnings = warnings
        self._every = every
        self._num_sums = 0  # steps whose numbers were summed, the same on all ranks, also after `close`
        self._is_open = True
        self._busy_s: list[float] = []
        self._num_flushes: int | None = None  # of the process until the last exchange; None before the first step
        self._flushes = 0  # of the process until the last step

    def close(self) -> None:
        """Send zeros from now on."""
        self._is_open, self._warnings = False, None

    def step(self, record: StepRecord) -> None:
        """Record one step."""
        self._flushes = record.num_alloc_retries or 0
        if self._num_flushes is None:
            self._num_flushes = self._flushes
        else:
            self._busy_s.append(record.busy_s)

    def statistics(self) -> tuple[Sequence[float], Receive]:
        """Return this step's numbers for the all-reduce. Most steps have none."""
        # Steps recorded, without the first. On an accelerator the last one is not recorded yet.
        num_taken = self._num_sums - 1
        if num_taken <= 0 or num_taken % self._every:
            return (), self._count
        num_sent, flushes = len(self._busy_s), self._flushes
        numbers = [0.0] * (2 * self._num_ranks)
        if self._is_open and num_sent:
            numbers[self._rank] = median(self._busy_s)
            numbers[self._num_ranks + self._rank] = flushes - (self._num_flushes or 0)

        def receive(sums: Sequence[float]) -> None:
            self._count(sums)
            del self._busy_s[:num_sent]
            self._num_flushes = flushes
            # A rank that has closed its report, or has no record yet, sent zeros.
            if self._warnings is not None and all(sums[: self._num_ranks]):
                num_flushes = [int(number) for number in sums[self._num_ranks :]]
                self._warnings.look_at_ranks(sums[: self._num_ranks], num_flushes, self._every)

        return numbers, receive

    def _count(self, _sums: Sequence[float]) -> None:
        self._num_sums += 1


def _check_is_possible(train: "TrainStep") -> None:
    if not driver_of(train).is_between_steps:
        raise StepError(
            "RunReport must be constructed between two optimizer steps, but a backward of this TrainStep has begun. "
            "Construct it after step() returned a report."
        )
    recorder = existing_recorder(train)
    if recorder is not None and recorder.figures is not None:
        raise StepError(
            "Another RunReport is open on this TrainStep, which can have one at a time. Close the other one first, or "
            "read its file while it grows."
        )


def _header(state: WrapState, figures: Figures) -> dict[str, Any]:
    plan, device = state.plan, device_of(state.mesh)
    return {
        "format": FORMAT,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"zeroamp": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "world_size": state.axes.whole.size(),
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

"""Monitors of a `TrainStep` by config keys: `tensorboard`, `csv_monitor`, `wandb`, `wall_clock_breakdown`."""

import csv
import logging
import weakref
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroamp.planning.mesh import is_first_rank
from zeroamp.policies.errors import ConfigError
from zeroamp.policies.extensions import Extension
from zeroamp.policies.policy import Policy
from zeroamp.policies.schema.config import FileMonitorBlock, WandbBlock
from zeroamp.rank_group import signals_of
from zeroamp.reporting.files import append_to, imported
from zeroamp.reporting.step_record import PARTS, StepRecord
from zeroamp.reporting.step_recorder import Sink, StepRecorder, recorder_of
from zeroamp.reporting.writers import Writer, Writers
from zeroamp.wrapping.state import wrap_state

if TYPE_CHECKING:
    from zeroamp.training.step import TrainStep

logger = logging.getLogger("zeroamp")

STEPS_PER_BREAKDOWN = 10
"""Steps between two log lines of `wall_clock_breakdown`, if the config has no `steps_per_print`."""


class Monitors(Extension):
    """Attaches the monitors of the config to each `TrainStep`."""

    def attach_step(self, train: "TrainStep") -> None:
        """Attach the monitors. All ranks call it."""
        attach_monitors(train)


def attach_monitors(train: "TrainStep") -> None:
    """Attach the monitors of the config, if it has any. All ranks call it.

    Raises:
        ConfigError: on all ranks, a monitor's package is missing, or its file cannot be written.
    """
    state = wrap_state(train.model)
    policy = state.plan.policy
    if not any((policy.tensorboard, policy.csv_monitor, policy.wandb, policy.wall_clock_breakdown)):
        return
    writers = Writers()
    signals_of(state).on_first(lambda: _open(writers, policy))
    if not is_first_rank(state.axes.whole):
        return
    sinks: list[Sink] = [writers.step]
    if policy.wall_clock_breakdown:
        sinks.append(breakdown(policy.steps_per_print or STEPS_PER_BREAKDOWN))
    recorder = recorder_of(train)
    for sink in sinks:
        recorder.add(sink)
    # Runs when the TrainStep is deleted or the process exits. On an accelerator the last record is written only then.
    weakref.finalize(train, _finish, recorder, sinks, writers)


def _open(writers: Writers, policy: Policy) -> None:
    if policy.csv_monitor is not None:
        writers.add(CsvWriter(policy.csv_monitor))
    if policy.tensorboard is not None:
        writers.add(TensorBoardWriter(policy.tensorboard))
    if policy.wandb is not None:
        writers.add(WandbWriter(policy.wandb, policy.to_config()))


def _finish(recorder: StepRecorder, sinks: list[Sink], writers: Writers) -> None:
    for sink in sinks:
        recorder.remove(sink)
    writers.close()


def breakdown(every: int) -> Sink:
    """Return a sink that logs the time split of each step whose number is a multiple of `every`, in ms.

    Skipped steps are not logged: a skipped step has the number of the step before.
    """

    def log(record: StepRecord) -> None:
        if not record.skipped and record.step % every == 0:
            text = ", ".join(f"{part.replace('_', ' ')} {getattr(record, f'{part}_s') * 1e3:.1f}" for part in PARTS)
            logger.info("step %d: %.1f ms: %s", record.step, record.step_s * 1e3, text)

    return log


class CsvWriter(Writer):
    """Writes `csv_monitor`'s file `<output_path>/<job_name>/steps.csv`: one row per step, one column per field.

    Several learning rates share one cell, separated by ";". Traffic is the sum of its bytes. Existing rows never
    change: a second `TrainStep`, in this process or a later one, appends its rows.
    """

    COLUMNS = tuple(field.name for field in fields(StepRecord))

    def __init__(self, block: FileMonitorBlock) -> None:
        path = _folder(block) / "steps.csv"
        head = path.read_text(encoding="utf-8").partition("\n")[0] if path.is_file() else ""
        if head and head.split(",") != list(self.COLUMNS):
            raise ConfigError(
                f"csv_monitor.output_path: {path} has other columns than this version writes. Move the file away."
            )
        self._file = append_to(path, "csv_monitor.output_path")
        self._rows = csv.writer(self._file, lineterminator="\n")
        if not head:
            self._rows.writerow(self.COLUMNS)

    def step(self, record: StepRecord) -> None:
        """Write one row."""
        row = {name: getattr(record, name) for name in self.COLUMNS}
        row["lr"] = ";".join(map(str, record.lr))
        row["traffic_bytes"] = sum(record.traffic_bytes.values())
        self._rows.writerow(row.values())  # None is an empty cell
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardWriter(Writer):
    """Writes `tensorboard`'s event files into `<output_path>/<job_name>`: a tag `train/<field>` per number, by step."""

    def __init__(self, block: FileMonitorBlock) -> None:
        tensorboard = imported("torch.utils.tensorboard", where="tensorboard.enabled", extra="tensorboard")
        self._writer = tensorboard.SummaryWriter(log_dir=str(_folder(block)))

    def step(self, record: StepRecord) -> None:
        """Queue all numbers of one step. A thread of TensorBoard writes them to disk."""
        for name, value in record.scalars().items():
            self._writer.add_scalar(f"train/{name}", value, record.step)

    def close(self) -> None:
        """Write the queued numbers, and close the files."""
        self._writer.close()


class WandbWriter(Writer):
    """Logs to one run of Weights & Biases: `train/<field>` per number. WANDB_MODE decides where the run is stored."""

    def __init__(self, block: WandbBlock, config: dict[str, Any]) -> None:
        wandb = imported("wandb", where="wandb.enabled", extra="wandb")
        self._run = wandb.init(project=block.project, group=block.group, entity=block.team, config=config)
        # wandb's own step must grow, but a skipped step has the number of the step before.
        self._run.define_metric("train/*", step_metric="step")

    def step(self, record: StepRecord) -> None:
        """Log one step."""
        self._run.log({"step": record.step} | {f"train/{name}": value for name, value in record.scalars().items()})

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def _folder(block: FileMonitorBlock) -> Path:
    return Path(block.output_path) / block.job_name

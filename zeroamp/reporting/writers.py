"""Where records go: JSON lines, CSV, TensorBoard, Weights & Biases. On the first rank only."""

import csv
import importlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from zeroamp.policies.errors import ConfigError, describe
from zeroamp.policies.schema.instruments import FileMonitorBlock, WandbBlock
from zeroamp.reporting.record import StepRecord


def check_folder(folder: Path) -> None:
    """Write into the folder, or into the nearest one above that is there, and leave nothing behind.

    Raises:
        OSError: as writing into the folder, which is made then, would.
    """
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    with tempfile.TemporaryDirectory(dir=nearest):
        pass


logger = logging.getLogger("zeroamp")


class Writer(Protocol):
    """One place that records go to."""

    def step(self, record: StepRecord) -> None:
        """Write one step."""

    def close(self) -> None:
        """Write what is left."""


@runtime_checkable
class WarningWriter(Writer, Protocol):
    """One that warnings go to as well."""

    def warning(self, name: str, text: str) -> None:
        """Write a warning."""


class Writers:
    """All of a run's. One that fails is closed with an error in the log: a full disk ends the log, not the training."""

    def __init__(self) -> None:
        self._writers: list[Writer] = []

    def add(self, writer: Writer) -> None:
        """Let `writer` have all that comes."""
        self._writers.append(writer)

    def step(self, record: StepRecord) -> None:
        """Write one step everywhere."""
        self._each(lambda writer: writer.step(record), f"nothing is written from step {record.step} on")

    def warning(self, name: str, text: str) -> None:
        """Write a warning where there is a place for it; the log has it."""

        def write(writer: Writer) -> None:
            if isinstance(writer, WarningWriter):
                writer.warning(name, text)

        self._each(write, f"nothing is written from the warning of {name} on")

    def close(self) -> None:
        """Close all."""
        self._each(lambda writer: writer.close(), "its end may be missing")
        self._writers.clear()

    def _each(self, act: Callable[[Writer], None], loss: str) -> None:
        for writer in list(self._writers):
            try:
                act(writer)
            except Exception as error:
                self._writers.remove(writer)
                where, why = type(writer).__name__, f"{type(error).__name__}: {error}"
                logger.error("%s: %s, because of %s. Training goes on", where, loss, why)
                with suppress(Exception):  # that it cannot write has been said
                    writer.close()


class JsonlWriter:
    """One JSON object per line, each with a "kind": header, step or warning. Every line is flushed.

    The header comes with the first line, a step's or the plan's warning. What a file holds is never changed: a run that
    goes on appends a header and its steps. A line that a crash cut is ended first, so that only it is lost.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self._file = _appended(path, "RunReport(path=)")
        self._header: dict[str, Any] | None = header  # None once it is written

    def step(self, record: StepRecord) -> None:
        """Write one line, after the header's."""
        self._begin()
        self._write(record.to_json())

    def warning(self, name: str, text: str) -> None:
        """Write one line."""
        self._begin()
        self._write({"kind": "warning", "name": name, "text": text})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _begin(self) -> None:
        if self._header is not None:
            self._write({"kind": "header", **self._header})
            self._header = None

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()


class CsvWriter:
    """`csv_monitor`: one file, `<output_path>/<job_name>/steps.csv`, one row per step, a column per field.

    Several learning rates are in one cell, apart by ";"; traffic is the sum of its bytes. What a file
    holds is never changed: a second `TrainStep`, of this process or a later one, appends, from its own first step on.
    """

    COLUMNS = tuple(field.name for field in fields(StepRecord))

    def __init__(self, block: FileMonitorBlock) -> None:
        path = _folder(block) / "steps.csv"
        head = path.read_text(encoding="utf-8").partition("\n")[0] if path.is_file() else ""
        if head and head.split(",") != list(self.COLUMNS):
            raise ConfigError(
                describe("csv_monitor.output_path", f"{path} with other columns", "a new file", "Move it away.")
            )
        self._file = _appended(path, "csv_monitor.output_path")
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


class TensorBoardWriter:
    """`tensorboard`: event files in `<output_path>/<job_name>`; a tag `train/<field>` per number, against steps."""

    def __init__(self, block: FileMonitorBlock) -> None:
        tensorboard = imported("torch.utils.tensorboard", where="tensorboard.enabled", extra="tensorboard")
        self._writer = tensorboard.SummaryWriter(log_dir=str(_folder(block)))

    def step(self, record: StepRecord) -> None:
        """Write all numbers of one step; a thread of TensorBoard's brings them to the disk."""
        for name, value in record.scalars().items():
            self._writer.add_scalar(f"train/{name}", value, record.step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandbWriter:
    """`wandb`: one run of Weights & Biases; `train/<field>` per number. Where it goes is up to WANDB_MODE."""

    def __init__(self, block: WandbBlock, config: dict[str, Any]) -> None:
        wandb = imported("wandb", where="wandb.enabled", extra="wandb")
        self._run = wandb.init(project=block.project, group=block.group, entity=block.team, config=config)
        # Not wandb's own step, which must grow: a step that is skipped has the number of the one before.
        self._run.define_metric("train/*", step_metric="step")

    def step(self, record: StepRecord) -> None:
        """Log one step."""
        self._run.log({"step": record.step} | {f"train/{name}": value for name, value in record.scalars().items()})

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def imported(module: str, *, where: str, extra: str) -> Any:
    """Return an optional module.

    Raises:
        ConfigError: it is not installed; the text says what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        found = f"no module {error.name!r}"
        raise ConfigError(
            describe(where, found, "an environment that has it", f"pip install zeroamp[{extra}]")
        ) from error


def _appended(path: Path, where: str) -> TextIO:
    """Open a file to append to. A line that a crash cut is ended first, so that only it is lost."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_cut = path.is_file() and not _ends_whole(path)
        file = path.open("a", encoding="utf-8", newline="")
        if is_cut:
            file.write("\n")
        return file
    except OSError as error:
        raise ConfigError(
            describe(where, f"{path}, which cannot be written ({error.strerror})", "a file that can", "Change it.")
        ) from error


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _folder(block: FileMonitorBlock) -> Path:
    return Path(block.output_path or "") / (block.job_name or "")

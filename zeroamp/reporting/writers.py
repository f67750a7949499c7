"""Writers of step records: JSON lines, a progress line, and `Writers`, which calls all writers of a run."""

import json
import logging
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from zeroamp.reporting.files import append_to, imported
from zeroamp.reporting.step_record import StepRecord

logger = logging.getLogger("zeroamp")

NUM_LINES = 20
"""Progress lines of a whole run, if the output is not a terminal."""


class Writer(Protocol):
    """Writes step records to one place."""

    def step(self, record: StepRecord) -> None:
        """Write one step."""

    def close(self) -> None:
        """Write what is buffered, and close."""


@runtime_checkable
class WarningWriter(Writer, Protocol):
    """A writer that writes warnings too."""

    def warning(self, name: str, text: str) -> None:
        """Write a warning."""


class Writers:
    """Calls all writers of a run. A writer that fails is closed and the error is logged: training continues."""

    def __init__(self) -> None:
        self._writers: list[Writer] = []

    def add(self, writer: Writer) -> None:
        """Add a writer, for all following steps and warnings."""
        self._writers.append(writer)

    def step(self, record: StepRecord) -> None:
        """Write one step with every writer."""
        self._each(lambda writer: writer.step(record), f"nothing is written from step {record.step} on")

    def warning(self, name: str, text: str) -> None:
        """Write a warning with every `WarningWriter`. The caller has logged it."""
        loss = f"nothing is written from the warning of {name} on"
        self._each(lambda writer: writer.warning(name, text) if isinstance(writer, WarningWriter) else None, loss)

    def close(self) -> None:
        """Close and remove all writers."""
        self._each(lambda writer: writer.close(), "its end may be missing")
        self._writers.clear()

    def _each(self, act: Callable[[Writer], None], loss: str) -> None:
        for writer in list(self._writers):
            try:
                act(writer)
            except Exception as error:
                self._writers.remove(writer)
                where, why = type(writer).__name__, f"{type(error).__name__}: {error}"
                logger.error("%s: %s, because of %s. Training continues", where, loss, why)
                with suppress(Exception):  # the first error has been logged
                    writer.close()


class JsonlWriter:
    """Writes one JSON object per line, each with a "kind": header, step or warning. Every line is flushed.

    The header is written before the first step or warning. Existing lines never change: a resumed run appends a header
    and its steps. If a crash cut the last line, that line is ended first, so that only it is lost.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self._file = append_to(path, "RunReport(path=)")
        self._header: dict[str, Any] | None = header  # None once it is written

    def step(self, record: StepRecord) -> None:
        """Write a step as one line."""
        self._begin()
        self._write(record.to_json())

    def warning(self, name: str, text: str) -> None:
        """Write a warning as one line."""
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


class ProgressLine:
    """Shows progress: a tqdm bar on a terminal, about twenty plain lines elsewhere, as in a log file."""

    def __init__(self, num_steps: int, file: TextIO | None = None) -> None:
        """`num_steps`: the optimizer steps of the whole run. `file`: stdout by default.

        Raises:
            ConfigError: the output is a terminal, and tqdm is not installed.
        """
        self._num_steps = num_steps
        self._file = file or sys.stdout
        self._lines_every = math.ceil(num_steps / NUM_LINES)
        self._is_first = True
        self._bar: Any = None
        self._tqdm: Any = None
        if self._file.isatty():
            self._tqdm = imported("tqdm", where="RunReport(num_steps=)", extra="report")

    def step(self, record: StepRecord) -> None:
        """Show one step."""
        is_due = not record.skipped and (record.step % self._lines_every == 0 or record.step == self._num_steps)
        if self._tqdm is not None:
            self._draw(record)
        elif self._is_first or is_due:  # a skipped step has the number of the step before
            print(f"step {record.step}/{self._num_steps}: {_words(record)}", file=self._file, flush=True)
        self._is_first = False

    def _draw(self, record: StepRecord) -> None:
        if self._bar is None:  # the first record has the step at which the run resumes
            self._bar = self._tqdm.tqdm(total=self._num_steps, initial=record.step, unit="step", file=self._file)
        self._bar.set_postfix_str(_words(record), refresh=False)
        self._bar.update(record.step - self._bar.n)

    def close(self) -> None:
        """Close the bar. It stays visible."""
        if self._bar is not None:
            self._bar.close()


def _words(record: StepRecord) -> str:
    words = [f"loss {record.loss:.4f}", f"norm {record.grad_norm:.3g}"]
    if record.skipped:
        words.append(f"skipped at scale {record.loss_scale:g}")
    if record.tokens_per_s is not None:
        words.append(f"{record.tokens_per_s:,.0f} tokens/s")
    if record.mfu is not None:
        words.append(f"MFU {record.mfu:.1%}")
    if record.peak_active_gib is None:
        words.append(f"peak RSS {record.peak_rss_gib:.2f} GiB")
    else:
        words.append(f"peak {record.peak_active_gib:.2f} GiB on the device")
    return ", ".join(words)

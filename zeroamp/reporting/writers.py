"""Writers of step records: JSON lines, and `Writers`, which calls all writers of a run."""

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from zeroamp.reporting.files import append_to
from zeroamp.reporting.step_record import StepRecord

logger = logging.getLogger("zeroamp")


class Writer:
    """Writes step records to one place."""

    def step(self, record: StepRecord) -> None:
        """Write one step."""
        raise NotImplementedError

    def warning(self, name: str, text: str) -> None:
        """Write a warning, which has been logged. By default nothing is written."""

    def close(self) -> None:
        """Write what is buffered, and close."""


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
        """Write a warning with every writer that writes warnings."""
        self._each(lambda writer: writer.warning(name, text), f"nothing is written from the warning of {name} on")

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


class JsonlWriter(Writer):
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

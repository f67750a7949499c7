"""One line that says where a run is."""

import math
import sys
from typing import Any, TextIO

from zeroamp.reporting.record import StepRecord
from zeroamp.reporting.writers import imported

NUM_LINES = 20
"""Lines of a whole run where the output is not a terminal."""


class ProgressLine:
    """A tqdm bar where the output is a terminal, else about twenty plain lines, which a log file can hold."""

    def __init__(self, num_steps: int, file: TextIO | None = None) -> None:
        """`num_steps`: the optimizer steps of the whole run. `file`: stdout by default.

        Raises:
            ConfigError: the output is a terminal, and there is no tqdm.
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
        elif self._is_first or is_due:  # a step that is skipped has the number of the one before
            print(f"step {record.step}/{self._num_steps}: {_words(record)}", file=self._file, flush=True)
        self._is_first = False

    def _draw(self, record: StepRecord) -> None:
        if self._bar is None:  # made here, since only here it is known at which step a run goes on
            self._bar = self._tqdm.tqdm(total=self._num_steps, initial=record.step, unit="step", file=self._file)
        self._bar.set_postfix_str(_words(record), refresh=False)
        self._bar.update(record.step - self._bar.n)

    def close(self) -> None:
        """Leave the bar where it is."""
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

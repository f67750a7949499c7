"""Runs the script of `zeroamp compare` in a run that is not timed: records the bytes of a step and the peak of memory.

Streams count the losses that this process prints. In the second half of them, a dispatch mode sees each collective,
also one that C++ issues. Nothing of torch is replaced. A rank that prints no loss only runs the script.
"""

import json
import os
import re
import resource
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

import torch

from zeroamp.cli.compare import FOLDER, PER_STEP
from zeroamp.hooks.observers.tracing import OpRecorder
from zeroamp.hooks.tensors import tensors_in
from zeroamp.policies.dtypes import short_name

_KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "reduce", "gather")


class _Observer(OpRecorder):  # type: ignore[no-untyped-call]
    """Counts losses and, while it is active, bytes: those of unsharded tensors, as `zeroamp.traffic` does."""

    def __init__(self, path: Path, num_losses: int) -> None:
        super().__init__()
        self.path, self.first, self.last, self.num = path, num_losses // 2, num_losses, 0
        self.num_bytes: Counter[str] = Counter()

    def see(self, func: Any, arguments: Any, out: Any) -> None:
        """Count the bytes of a collective."""
        op = func._schema.name.replace("_", "")
        kind = next((kind for kind in _KINDS if kind.replace("_", "") in op), None)
        if kind is not None and func.namespace in ("c10d", "_c10d_functional"):
            sides = [list(tensors_in(value)) for value in (*arguments[0], out)]
            for tensor in max(sides, key=lambda tensors: sum(each.nbytes for each in tensors)):  # the unsharded side
                self.num_bytes[f"{kind} {short_name(tensor.dtype)}{PER_STEP}"] += tensor.nbytes

    def on_loss(self) -> None:
        """Handle a loss, before it leaves the process."""
        self.num += 1
        if self.num == 1:
            self.path.touch()  # shows a second process that prints losses
        if self.num == self.first:
            rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            self.peaks = {"peak allocated on CUDA": torch.cuda.max_memory_allocated(), "peak of resident memory": rss}
            self.__enter__()  # type: ignore[no-untyped-call]
        elif self.num == self.last:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            sent = {name: size / (self.last - self.first) for name, size in sorted(self.num_bytes.items())}
            self.path.write_text(json.dumps(sent | self.peaks))


class _Stream:
    """A stream that calls the observer for each line with a loss, before it writes the line's end."""

    def __init__(self, stream: TextIO, loss: str, observer: _Observer) -> None:
        self._stream, self._loss, self._observer, self._line = stream, re.compile(loss), observer, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        *lines, self._line = re.split(r"[\r\n]", self._line + text)
        for _ in filter(self._loss.search, lines):
            self._observer.on_loss()
        return self._stream.write(text)


def main() -> None:
    """Run the script, or -m and a module. What a launcher put before it, such as --local_rank, is its argument too."""
    folder = Path(os.environ[FOLDER])
    settings = json.loads((folder / "settings.json").read_text())
    observer = _Observer(folder / f"{os.getpid()}.observed", settings["steps"])
    sys.stdout, sys.stderr = (_Stream(each, settings["loss"], observer) for each in (sys.stdout, sys.stderr))
    at = next(index for index, text in enumerate(sys.argv) if index and (text == "-m" or text.endswith(".py")))
    name = sys.argv[at + 1 if (is_module := sys.argv[at] == "-m") else at]
    sys.argv = [name, *sys.argv[1:at], *sys.argv[at + 1 + is_module :]]
    sys.path[0] = os.getcwd() if is_module else str(Path(name).resolve().parent)  # as python does
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()

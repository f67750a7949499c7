"""`zeroamp compare`: runs two training commands in pairs, and prints where they differ and what each costs.

The scripts may be of any library: a step is a printed loss. A run is killed after enough of them. torchrun's workers
have sessions of their own, so /proc finds the processes of a run, by a variable in their environment.
"""

import json
import math
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from zeroamp.cli.arguments import add_formats, positive
from zeroamp.policies.errors import ConfigError, StepError
from zeroamp.policies.numbers import byte_unit, counted, size_text
from zeroamp.reporting.page import check_page, write_page
from zeroamp.reporting.tables import Row, paragraph, render

FOLDER = "ZEROAMP_COMPARE"
"""The environment variable with the folder of `settings.json` and of what is recorded."""
PER_STEP = " per step"
"""Ends the keys of what a step sends."""
SUM = f"sent in all{PER_STEP}"
LONGEST_LINE = 2**16
"""Bytes of a line of output. Of a longer one the last bytes are read."""

_NUMBER = r"""['"]?\s*[:=]?\s*['"]?(?:tensor\()?([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf))"""
_LOSS = rf"(?i)\bloss{_NUMBER}"
_GRAD_NORM = rf"(?i)\bgrad(?:ient)?[_ ]norm{_NUMBER}"


@dataclass(kw_only=True, slots=True)
class Run:
    """What a run printed, and when it printed the losses."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step_s(self) -> float:
        """Return the median time between two losses of the second half, in seconds."""
        return median(later - earlier for earlier, later in pairwise(self.seconds[len(self.seconds) // 2 - 1 :]))


def compare(options: Namespace) -> str:
    """Run two training commands in turn: compare losses, gradient norms, bytes, memory and time.

    zeroamp compare "torchrun --nproc-per-node 2 train.py" "torchrun --nproc-per-node 2 train_zeroamp.py"
    Step n is the n-th printed loss. Each run is killed after --steps losses: let the script save nothing.
    """
    if options.steps < 4:
        raise ConfigError(f"--steps is {options.steps}, but must be at least 4: half of the losses are warm-up.")
    check_page(options.html)
    commands: dict[str, str] = dict(zip("AB", options.commands, strict=True))
    runs: dict[str, list[Run]] = {"A": [], "B": []}
    with _signals_interrupt():
        num_bytes = {name: _observe(name, command, options) for name, command in commands.items()}
        for number in range(options.rounds):
            for name in ("AB", "BA")[number % 2]:
                runs[name].append(_run(name, commands[name], options))
                last = runs[name][-1].losses[-1]
                sys.stderr.write(f"{name}, run {number + 1} of {options.rounds}: last loss {last}\n")
    ratios = [b.step_s() / a.step_s() for a, b in zip(runs["A"], runs["B"], strict=True)]
    measured = {"commands": commands, "bytes": num_bytes, "runs": runs, "time_ratios": ratios}
    data = json.loads(json.dumps(measured, default=asdict), parse_constant=str)  # strict JSON has no NaN
    rows, conclusions = _rows(runs, num_bytes, ratios), _conclusions(runs, num_bytes, ratios)
    shown = {**data, "rows": rows, "conclusions": conclusions}
    write_page(options.html, "compare", "A beside B", f"A: {commands['A']}. B: {commands['B']}.", shown, {})
    if options.json:
        return json.dumps(data, indent=2)
    text = [f"A: {commands['A']}\nB: {commands['B']}", render(rows), "\n".join(map(paragraph, conclusions))]
    return "\n\n".join(text)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `compare`."""
    add = parser.add_argument
    add("commands", metavar="COMMAND", nargs=2, help="A shell command, in quotes, that prints losses.")
    add("--steps", metavar="N", type=positive, default=10, help="Losses per run, half of them warm-up. Default: 10.")
    add("--rounds", metavar="N", type=positive, default=3, help="Pairs of timed runs. Default: 3.")
    add("--timeout", metavar="SECONDS", type=positive, default=600, help="Of one run. Default: 600.")
    help = "Regular expression with one group, the number. Default: loss 2.3, loss: 2.3, loss=2.3, {'loss': 2.3}."
    add("--loss", metavar="REGEX", type=_pattern, default=_LOSS, help=help)
    add("--grad-norm", metavar="REGEX", type=_pattern, default=_GRAD_NORM, help="The same of the gradient norm.")
    add_formats(parser, "One JSON object: all that was measured, in bytes and seconds.")


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt as Ctrl-C does, so that the processes of a run are killed."""
    numbers = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]  # nohup ignores SIGHUP
    for number in ours:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _pattern(text: str) -> str:
    with suppress(re.error):
        if re.compile(text).groups == 1:
            return text
    raise ArgumentTypeError(f"{text!r} is not a regular expression with one group (...), around the number.")


def _observe(name: str, command: str, options: Namespace) -> dict[str, float]:
    """Run the command with `observed` before its script, and return what that records; {} if it sees no loss."""
    script = re.search(r"[^\s'\"]+\.py\b|(?<!\S)-m (?!torch\.|accelerate)", command)  # no -m of a launcher
    with TemporaryDirectory() as folder:
        if script is not None:
            Path(folder, "settings.json").write_text(json.dumps({"loss": options.loss, "steps": options.steps}))
            before, after = command[: script.start()], command[script.start() :]
            _run(name, f"{before}{shlex.quote(str(Path(__file__).with_name('observed.py')))} {after}", options, folder)
        found = [path.read_text() for path in Path(folder).glob("*.observed")]
    if len(found) > 1:
        what = "Name one rank in --loss, or start torchrun with --local-ranks-filter 0."
        raise ConfigError(f"{len(found)} processes of {name} print losses, which mixes their steps. {what}")
    if not any(found):
        sys.stderr.write(f"{name}: no bytes, no memory: no FILE.py or -m MODULE in the command prints the losses.\n")
    return json.loads(found[0]) if any(found) else {}


def _run(name: str, command: str, options: Namespace, folder: str = "") -> Run:
    """Run a command in a shell up to its last loss, and kill all of its processes."""
    run, output, begin_s = Run(), deque[str](maxlen=20), time.perf_counter()
    folder = folder or f"run {time.time_ns()}"  # marks the processes
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", FOLDER: folder}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, shell=True, env=environment, **pipes) as process:
        ender = threading.Thread(target=_end, args=(process, folder, options.timeout))
        try:
            ender.start()
            for line in _lines(process, ender):
                output.append(line)
                run.grad_norms += [float(text) for text in re.findall(options.grad_norm, line)]
                if found := re.search(options.loss, line):
                    run.seconds.append(time.perf_counter() - begin_s)
                    run.losses.append(float(found[1]))
                if len(run.losses) == options.steps:
                    return run
            process.wait()
        except ValueError as error:
            raise ConfigError(f"--loss or --grad-norm finds no number: {error}. The line is: {line}") from error
        finally:
            process.kill()
            if ender.is_alive():
                ender.join()
    is_late = time.perf_counter() - begin_s > options.timeout
    end = (
        f"was killed after {options.timeout} s (--timeout)" if is_late else f"ended with exit code {process.returncode}"
    )
    raise StepError(
        f"{name} {end}, after {len(run.losses)} of {options.steps} losses (--steps) that match --loss. The last lines "
        f"of its output:\n{chr(10).join(output)}"
    )


def _lines(process: subprocess.Popen[bytes], ender: threading.Thread) -> Iterator[str]:
    """Yield the lines of a run's output, up to its end, or to 1 s after `ender` has killed the run.

    A process that does not have the mark in its environment is not killed, and may hold the output open.
    """
    line, end_s = b"", math.inf
    if process.stdout is None:
        raise AssertionError("expected a pipe")
    output = process.stdout.fileno()
    while time.perf_counter() < end_s:
        if not ender.is_alive():
            end_s = min(end_s, time.perf_counter() + 1)
        if not select.select([output], [], [], 0.1)[0]:
            continue
        if not (read := os.read(output, LONGEST_LINE)):
            break
        *lines, line = re.split(rb"[\r\n]", line + read)
        yield from (each.decode(errors="replace") for each in lines if each)
        line = line[-LONGEST_LINE:]
    if line:
        yield line.decode(errors="replace")


def _end(process: subprocess.Popen[bytes], folder: str, timeout_s: float) -> None:
    """Kill all processes of a run when its first one has ended, or after the timeout. Others may hold its output."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    process.kill()
    mark, is_left = f"{FOLDER}={folder}\0".encode(), True
    while is_left:
        is_left = process.poll() is None
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes():
                    is_left = True
                    os.kill(int(path.parent.name), signal.SIGKILL)
        time.sleep(0.02)


def _rows(runs: dict[str, list[Run]], num_bytes: dict[str, dict[str, float]], ratios: list[float]) -> list[Row]:
    a, b = runs["A"][0], runs["B"][0]
    rows = [_row(f"loss {step}", *pair) for step, pair in enumerate(zip(a.losses, b.losses, strict=True), 1)]
    norms = zip_longest(a.grad_norms, b.grad_norms)
    rows += [_row(f"gradient norm {step}", *pair) for step, pair in enumerate(norms, 1)]
    rows.append(_row("loss, spread between runs", *map(_spread, runs.values())))
    unit, size = byte_unit(max((value for each in num_bytes.values() for value in each.values()), default=0))
    sums = [{SUM: _sent(each), **each} if each else {} for each in num_bytes.values()]
    for key in {**sums[0], **sums[1]}:
        sizes = [each.get(key, 0) / size if each else None for each in sums]
        if any(sizes):
            rows.append(_row(f"{key}, {unit}", *sizes))
    times_s = [median(run.step_s() for run in each) for each in runs.values()]
    return [*rows, _row("time of a step, s", *times_s) | {"B / A": f"{median(ratios):.3f}"}]


def _sent(num_bytes: dict[str, float]) -> float:
    return sum(size for key, size in num_bytes.items() if key.endswith(PER_STEP))


def _spread(runs: list[Run]) -> float:
    """Return the largest difference between runs of one command in the loss of a step."""
    by_step: list[tuple[float, ...]] = list(zip(*(run.losses for run in runs), strict=True))
    return max(max(losses) - min(losses) for losses in by_step)


def _conclusions(runs: dict[str, list[Run]], num_bytes: dict[str, dict[str, float]], ratios: list[float]) -> list[str]:
    """Return sentences: whether losses and norms are equal, the ratio of bytes, the ratio of times."""
    a, b = runs["A"][0], runs["B"][0]
    lines = [_first_difference("Losses", a.losses, b.losses)]
    if spread := max(map(_spread, runs.values())):
        lines.append(f"Runs of one command differ by up to {spread:.3g} in a loss.")
    if a.grad_norms and b.grad_norms:
        lines.append(_first_difference("Gradient norms", a.grad_norms, b.grad_norms))
    sent = [_sent(each) for each in num_bytes.values()]
    if all(sent):
        texts = ", ".join(f"{name} {size_text(size)}" for name, size in zip("AB", sent, strict=True))
        lines.append(f"Sent per step: {texts}. B / A is {sent[1] / sent[0]:.3f}.")
    low, middle, high = quantiles(ratios * 2 if len(ratios) == 1 else ratios, method="inclusive")
    pairs = counted(len(ratios), "pair of runs", "pairs of runs")
    lines.append(f"Time of a step: B / A is {middle:.3f} (quartiles {low:.3f} to {high:.3f}, {pairs}).")
    return lines


def _first_difference(what: str, a: list[float], b: list[float]) -> str:
    pairs = list(zip(a, b, strict=False))
    differs = {step: y - x for step, (x, y) in enumerate(pairs, 1) if x != y and not (math.isnan(x) and math.isnan(y))}
    if not differs:
        return f"{what}: equal in all {counted(len(pairs), 'step')}, as printed."
    first = min(differs)
    largest = max(differs, key=lambda step: abs(differs[step]))
    return (
        f"{what}: B - A is first not 0 at step {first} of {len(pairs)} ({differs[first]:+.3g}), and largest at step "
        f"{largest} ({differs[largest]:+.3g})."
    )


def _row(what: str, a: float | None, b: float | None) -> Row:
    row = {"": what, "A": "-" if a is None else f"{a:.7g}", "B": "-" if b is None else f"{b:.7g}"}
    difference = "-" if a is None or b is None else f"{b - a:+.3g}" if a != b else "0"
    return {**row, "B - A": difference, "B / A": f"{b / a:.3f}" if a and b is not None else "-"}

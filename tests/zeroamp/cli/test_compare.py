"""`zeroamp compare`: what it reads from two scripts, what it counts, and that it leaves no process behind."""

import json
import math
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from tests.processes.cli import run
from tests.processes.launch import environment
from zeroamp.cli import compare
from zeroamp.cli.compare import _LOSS, Run
from zeroamp.reporting.tables import render

PYTHON = shlex.quote(sys.executable)
TORCHRUN = f"{PYTHON} -m torch.distributed.run --standalone --nproc-per-node 2"

STEPS = """
import sys, time
for step in range(1, 9):
    time.sleep({seconds})
    print({line})
    print("evaluated", step, "eval_loss: 9.9", file=sys.stderr)
time.sleep(600)
"""

FSDP2 = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))
for layer in model:
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
fully_shard(model)
while True:
    for _ in range(2):  # micro-batches
        loss = model(torch.ones(2, 64)).square().mean()
        loss.backward()
    if dist.get_rank() == 0:
        print("loss", loss.item())
"""

WITH_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open("children", "a").write(f"{os.getpid()} {child.pid} ")
"""


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def steps(line, seconds=0.02, path=None, before=""):
    """Return a command that prints a line 8 times: of a script at the path, or of none, which is not observed."""
    text = before + STEPS.format(line=line, seconds=seconds)
    if path is None:
        return f"{PYTHON} -c {shlex.quote(text)}"
    Path(path).write_text(text)
    return f"{PYTHON} {path}"


def step_s(seconds):
    """The median time between two of the last four of six losses."""
    return median(later - earlier for earlier, later in pairwise(seconds[2:]))


def test_losses_norms_and_times_are_compared_step_by_step_in_alternating_pairs():
    """No process is left, not even one with a session of its own."""
    a = steps('"loss", 1 / step, "grad_norm", 2', path="a.py", before=WITH_CHILD)
    steps('{"loss": 1 / step + (step > 2), "grad_norm": 4}', seconds=0.05, path="b.py", before=WITH_CHILD)
    code, out, err = run("compare", a, f"cd . && {PYTHON} -m b", "--steps", 6, "--rounds", 2, "--json")
    assert code == 0, err
    found = json.loads(out)
    for each in found["runs"]["A"]:
        assert (each["losses"], each["grad_norms"]) == ([1 / step for step in range(1, 7)], [2] * 6)
    assert [each["losses"][1:3] for each in found["runs"]["B"]] == [[1 / 2, 1 / 3 + 1]] * 2
    a_s, b_s = ([step_s(each["seconds"]) for each in found["runs"][name]] for name in "AB")
    assert found["time_ratios"] == [b / a for a, b in zip(a_s, b_s, strict=True)]
    assert all(each["peak of resident memory"] > 2**20 for each in found["bytes"].values())  # a script, and -m
    assert re.findall(r"^(\w), run (\d)", err, re.MULTILINE) == [("A", "1"), ("B", "1"), ("B", "2"), ("A", "2")]
    assert_nothing_runs(2 * (2 + 4))  # of observed and of timed runs


def test_the_table_has_differences_and_the_quartiles_of_the_ratio():
    a, b = steps('"loss =", 2 * step'), steps('"loss =", 2 * step + (step == 3) / 2')
    code, out, err = run("compare", a, b, "--steps", 4, "--rounds", 1)
    assert code == 0, err
    assert re.search(r"^loss 2 +4 +4 +0 +1\.000$", out, re.MULTILINE)
    assert re.search(r"^loss 3 +6 +6\.5 +\+0\.5 +1\.083$", out, re.MULTILINE)
    assert re.search(r"^loss, spread between runs +0 +0 ", out, re.MULTILINE)
    assert re.search(r"^time of a step, s +0\.0\S+ +0\.0\S+ +\S+ +\d\.\d{3}$", out, re.MULTILINE)
    sentences = " ".join(out.split())  # wrapped at the width of the terminal
    assert "Losses: B - A is first not 0 at step 3 of 4 (+0.5), and largest at step 3 (+0.5)." in sentences
    times = r"Time of a step: B / A is \d\.\d{3} \(quartiles \d\.\d{3} to \d\.\d{3}, 1 pair of runs\)\.$"
    assert re.search(times, sentences)


def runs_of(losses, grad_norms=()):
    return [Run(losses=losses, grad_norms=list(grad_norms), seconds=[float(index) for index in range(len(losses))])]


def test_the_table_fits_80_columns_and_adds_bytes_up(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    sent = {
        "reduce_scatter fp32 per step": 3.0 * 2**20,
        "all_gather bf16 per step": 2**20,
        "peak allocated on CUDA": 9.0,
    }
    runs = {name: runs_of([2.4345481 + offset] * 6, [1.5e-7] * 6) for name, offset in (("A", 0), ("B", 1.5e-6))}
    text = render(compare._rows(runs, {"A": sent, "B": {**sent, "all_gather bf16 per step": 0.0}}, [1.0]))
    assert "\n\n" not in text  # one table
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"^sent in all per step, MiB +4 +3 +-1 +0\.750$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("b", "sentence"),
    [
        ([1.0, math.nan, 3.0], "Losses: equal in all 3 steps, as printed."),
        ([1.0, math.nan, 3.5], "Losses: B - A is first not 0 at step 3 of 3 (+0.5), and largest at step 3 (+0.5)."),
        ([1.5, math.nan, 2.0], "Losses: B - A is first not 0 at step 1 of 3 (+0.5), and largest at step 3 (-1)."),
        ([1.0, 2.0, 3.0], "Losses: B - A is first not 0 at step 2 of 3 (+nan), and largest at step 2 (+nan)."),
    ],
)
def test_the_conclusions_name_the_first_difference(b, sentence):
    runs = {"A": runs_of([1.0, math.nan, 3.0]), "B": runs_of(b)}
    assert compare._conclusions(runs, {"A": {}, "B": {}}, [1.0])[0] == sentence


def test_the_conclusions_add_bytes_up_and_name_the_spread_between_runs():
    sent = {"all_gather bf16 per step": 2.0**20, "all_reduce fp32 per step": 2.0**20, "peak of resident memory": 5e9}
    runs = {"A": [*runs_of([1.0, 2.0]), *runs_of([1.0, 2.25])], "B": runs_of([1.0, 2.0])}
    conclusions = compare._conclusions(runs, {"A": sent, "B": {"all_gather bf16 per step": 2.0**20}}, [1.0, 1.2])
    assert conclusions[1:] == [
        "Runs of one command differ by up to 0.25 in a loss.",
        "Sent per step: A 2.00 MiB, B 1.00 MiB. B / A is 0.500.",
        "Time of a step: B / A is 1.100 (quartiles 1.050 to 1.150, 2 pairs of runs).",
    ]


def test_the_page_has_what_is_printed():
    pytest.importorskip("plotly")
    a, b = steps('"loss =", 2 * step'), steps('"loss =", 2 * step if step != 3 else float("nan")')
    code, out, err = run("compare", a, b, "--steps", 4, "--rounds", 1, "--html", "pages/page.html")
    assert code == 0, err
    data = json.loads(re.search(r'id="data">(.*?)</script>', Path("pages/page.html").read_text(), re.DOTALL)[1])
    assert data["runs"]["B"][0]["losses"] == [2.0, 4.0, "NaN", 8.0]
    assert all(sentence in " ".join(out.split()) for sentence in data["conclusions"])


@pytest.mark.parametrize("text", ["loss 2.5", "Loss: 2.5", "loss=2.5,", "{'loss': '2.5'}", "loss tensor(2.5)"])
def test_the_default_pattern_finds_a_loss(text):
    assert re.findall(_LOSS, f"eval_loss 9.9 {text} loss_scale 4") == ["2.5"]


def test_a_pattern_that_finds_no_number_is_an_error():
    code, _, err = run("compare", "echo loss=2.5,", "unused", "--loss", r"loss=(\S+)")
    assert code == 1
    assert "Error: --loss or --grad-norm finds no number: could not convert string to float: '2.5,'" in err


@pytest.mark.slow
def test_the_bytes_of_fsdp2_are_those_of_its_parameters():
    Path("fsdp2.py").write_text(FSDP2)
    code, out, err = run("compare", f"{TORCHRUN} fsdp2.py", steps('"loss", 1'), "--steps", 4, "--rounds", 1, "--json")
    assert code == 0, err
    num_params = 64 * 32 + 32 + 32 * 16 + 16
    sent = {name: size for name, size in json.loads(out)["bytes"]["A"].items() if not name.startswith("peak")}
    all_gathers, reductions = 2 * 2 * 2 * num_params, 2 * 4 * num_params  # two micro-batches; forward, backward
    assert sent == {"all_gather bf16 per step": all_gathers, "reduce_scatter fp32 per step": reductions}
    assert "B: no bytes, no memory" in err


def test_two_ranks_that_print_losses_are_an_error():
    steps('"loss", 1.0', path="a.py")
    code, _, err = run("compare", f"for rank in 0 1; do {PYTHON} a.py & done; wait", "unused")
    assert code == 1
    assert "Error: 2 processes of A print losses" in err


@pytest.mark.parametrize(
    ("script", "arguments", "sentence"),
    [
        ("print('loss', 1); raise OSError('no data here')", [], "A ended with exit code 1, after 1 of 10 losses"),
        ("print('no data here')", [], "A ended with exit code 0, after 0 of 10 losses (--steps) that match --loss"),
        ("print('no data here'); time.sleep(600)", ["--timeout", 3], "A was killed after 3 s (--timeout), after 0"),
    ],
)
def test_a_run_without_its_losses_is_an_error(script, arguments, sentence):
    """A run without its losses is an error with the end of its output."""
    command = f"{PYTHON} -c {shlex.quote(WITH_CHILD + script)}"
    code, out, err = run("compare", command, "unused", *arguments)
    assert (code, out) == (1, "")
    assert f"Error: {sentence}" in err
    assert "no data here" in err
    assert_nothing_runs(2)


def test_a_process_that_holds_the_output_does_not_delay_the_end():
    """A process without the mark in its environment is not found, as one of another container."""
    holder = "env -i sleep 600"
    script = f"import subprocess; p = subprocess.Popen({holder.split()}); open('children', 'a').write(f'{{p.pid}} ')"
    code, _, err = run("compare", f"{PYTHON} -c {shlex.quote(script)}", "unused", "--timeout", 60)
    for pid in Path("children").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    assert code == 1
    assert "A ended with exit code 0, after 0 of 10 losses" in err


def test_output_without_a_line_break_is_not_retained():
    """A run prints 100 MB in one line; then its losses, after carriage returns, are found."""
    script = "import sys; [sys.stdout.write('x' * 10**6) for _ in range(100)]; print('no loss here')"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, _, err = run("compare", f"{PYTHON} -c {shlex.quote(script)}", "unused", "--timeout", 60)
    assert code == 1
    assert "x no loss here" not in err
    assert "xno loss here" in err
    assert len(err) < 200_000  # the end of a line, of at most twice 64 KiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 2**10, "KiB"


def test_a_signal_ends_the_run_and_its_processes():
    script = f"{PYTHON} -c {shlex.quote(WITH_CHILD + 'time.sleep(600)')}"
    command = [sys.executable, "-m", "zeroamp", "compare", script, "unused", "--timeout", "60"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        children = Path("children")
        while process.poll() is None and not (children.exists() and len(children.read_text().split()) == 2):
            time.sleep(0.02)
        process.terminate()
        assert process.wait() == -signal.SIGINT
    assert_nothing_runs(2)


def assert_nothing_runs(num_processes):
    pids = Path("children").read_text().split()
    assert len(pids) == num_processes
    lines = [path.read_bytes() for pid in pids if (path := Path(f"/proc/{pid}/cmdline")).exists()]
    assert not any(lines), lines  # a zombie has none

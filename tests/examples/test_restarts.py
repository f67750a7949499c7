"""The example continues from its checkpoints, bit for bit: after kills under torchrun's restarts, and after SIGTERM."""

import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.processes.launch import ROOT, environment, write_sums

REQUIRED = ("transformers", "tokenizers", "yaml", "matplotlib")
if missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
    pytest.skip(f"the examples extra is not installed: {missing}", allow_module_level=True)

pytestmark = pytest.mark.timeout(900)
RUN_TIMEOUT_S = 270  # three starts and more, on a busy machine
NUM_STEPS = 12


class Run:
    """The example under torchrun; `lines` grows as it prints."""

    def __init__(self, out, data, *arguments, num_ranks=2):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks, "--max-restarts", 3]
        sizes = ["--seq-len", "64", "--eval-sequences", "4", "--steps", NUM_STEPS, "--lr", "3e-3"]
        sizes += ["--train-batch-size", 16, "--micro-batch-size", 4]
        script = [ROOT / "examples" / "finetune_llama.py", "--model", "tiny", "--data", data, "--out", out]
        command = [sys.executable, *launcher, *script, *sizes, *arguments]
        self.process = subprocess.Popen(
            [str(argument) for argument in command],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.lines = []
        self._timer = threading.Timer(RUN_TIMEOUT_S, self._kill)
        self._timer.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._timer.cancel()
        if self.process.poll() is None:
            self._kill()
        self.process.stdout.close()
        self.process.wait()

    def _kill(self):
        ranks = self.ranks()
        os.killpg(self.process.pid, signal.SIGKILL)  # first torchrun: it would start the ranks again
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)

    def ranks(self):
        """Process ids, in rank order."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        scripts = {}
        for pid in children:
            with suppress(OSError):  # it has ended
                scripts[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes()
        return [pid for pid, command in scripts.items() if b"finetune_llama.py" in command]

    def wait_for(self, pattern):
        """Read on until a line matches; return whether one did."""
        for line in self.process.stdout:
            self.lines.append(line)
            if re.match(pattern, line):
                return True
        return False

    def finish(self):
        """Read to the end; return the exit status."""
        self.wait_for("(?!)")
        return self.process.wait()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_sums(tmp_path_factory.mktemp("data") / "sums.jsonl")


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    with Run(out, data) as run:
        assert run.finish() == 0, "".join(run.lines)
    return _numbers(out)


def _numbers(out):
    run = json.loads((out / "losses.json").read_text())
    assert len(run["losses"]) == NUM_STEPS
    return {name: run[name] for name in ("losses", "grad_norms", "num_tokens", "held_out_before", "held_out_after")}


@pytest.mark.slow
def test_sigterm_and_kills_do_not_change_the_run(data, uninterrupted, tmp_path):
    """SIGTERM saves at the end of the step and ends. After a kill, torchrun starts the ranks again."""
    random_ = random.Random(0)
    with Run(tmp_path, data, "--resume", "auto") as run:
        assert run.wait_for("step 3/"), "".join(run.lines)
        os.kill(random_.choice(run.ranks()), signal.SIGTERM)  # to one rank
        assert run.finish() == 0, "".join(run.lines)
        assert "preempted: saved" in "".join(run.lines)
    with Run(tmp_path, data, "--resume", "auto", "--save-every", "1") as run:
        assert run.wait_for("step 7/"), "".join(run.lines)  # the checkpoint of step 5 is written: that of step 6 waited
        threading.Event().wait(random_.uniform(0, 0.2))
        os.kill(random_.choice(run.ranks()), signal.SIGKILL)
        assert run.wait_for("resuming after step"), "".join(run.lines)
        assert run.wait_for("step 9/"), "".join(run.lines)
        run.process.send_signal(signal.SIGTERM)  # to torchrun, which passes it on
        assert run.wait_for("preempted: saved"), "".join(run.lines)
        run.finish()  # torchrun's own status says that it was asked to end
    with Run(tmp_path, data, "--resume", "auto") as run:
        assert run.finish() == 0, "".join(run.lines)
    assert _numbers(tmp_path) == uninterrupted


@pytest.mark.slow
def test_a_reproducible_run_ends_with_the_files_of_one_rank(data, tmp_path):
    """A reproducible run on 4 ranks and then on 1 ends with the files of a run on 1."""
    config = ["--config", ROOT / "examples" / "configs" / "reproducible_autocast_bf16.json"]
    whole, parts, changes = tmp_path / "whole", tmp_path / "parts", []
    with Run(whole, data, *config, num_ranks=1) as run:
        assert run.finish() == 0, "".join(run.lines)
    for num_ranks, step in ((4, 5), (1, None)):  # two saves before step 5: the second waits for the first
        with Run(parts, data, *config, "--save-every", "2", "--resume", "auto", num_ranks=num_ranks) as run:
            if step is None:
                assert run.finish() == 0, "".join(run.lines)
            else:
                assert run.wait_for(f"step {step}/"), "".join(run.lines)  # leaving the block kills it
            assert (num_ranks == 4) == (not any(line.startswith("resuming after step") for line in run.lines))
            changes += [line.strip() for line in run.lines if line.startswith("after step")]
    assert [change.split(": ")[1] for change in changes] == [
        "ranks 4 -> 1, gradient_accumulation_steps 1 -> 4, train_batch_size is still 16",
    ]
    assert json.loads((parts / "losses.json").read_text())["changes"] == changes
    for name in ("losses", "grad_norms", "num_tokens"):
        assert _numbers(parts)[name] == _numbers(whole)[name]
    weights = sorted(path.name for path in (whole / "model").glob("*.safetensors"))
    assert weights
    for name in weights:
        assert (parts / "model" / name).read_bytes() == (whole / "model" / name).read_bytes()

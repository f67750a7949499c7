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
from unittest import mock

import pytest
import torch.distributed as dist

import zeroamp
from tests.processes.launch import ROOT, as_rank, environment, on_ranks, write_sums

REQUIRED = ("transformers", "tokenizers", "yaml", "matplotlib")
if missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
    pytest.skip(f"the examples extra is not installed: {missing}", allow_module_level=True)

pytestmark = pytest.mark.timeout(900)
RUN_TIMEOUT_S = 270  # two starts, on a busy machine
NUM_STEPS = 12
EXAMPLE = ROOT / "examples" / "finetune_llama.py"
SIZES = ("--seq-len", 64, "--eval-sequences", 4, "--steps", NUM_STEPS, "--lr", "3e-3", "--train-batch-size", 16,
         "--micro-batch-size", 4)  # fmt: skip
CONFIG = ("--config", ROOT / "examples" / "configs" / "reproducible_autocast_bf16.json")


def arguments(out, data, *more):
    return ["--model", "tiny", "--data", data, "--out", out, "--resume", "auto", *SIZES, *more]


class Run:
    """The example under torchrun; `lines` grows as it prints."""

    def __init__(self, *arguments):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", 3]
        command = [sys.executable, *launcher, EXAMPLE, *arguments]
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


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_sums(tmp_path_factory.mktemp("data") / "sums.jsonl")


def _numbers(out):
    run = json.loads((out / "losses.json").read_text())
    assert len(run["losses"]) == NUM_STEPS
    return {name: run[name] for name in ("losses", "grad_norms", "num_tokens", "held_out_before", "held_out_after")}


def _stopped(step, *arguments):
    """Run the example on this rank; one rank gets SIGTERM in an optimizer step."""
    take_step, before = zeroamp.TrainStep.step, signal.getsignal(signal.SIGTERM)

    def signalled(self):
        if self.num_steps == step and dist.get_rank() == dist.get_world_size() - 1:
            signal.raise_signal(signal.SIGTERM)
        return take_step(self)

    with mock.patch.object(zeroamp.TrainStep, "step", signalled):
        printed = as_rank(EXAMPLE, *map(str, arguments))
    signal.signal(signal.SIGTERM, before)
    return printed


@pytest.mark.slow
def test_sigterm_and_kills_do_not_change_the_run(ranks2, data, tmp_path):
    """SIGTERM saves at the end of the step and ends. After a kill, torchrun starts the ranks again."""
    random_, parts, whole = random.Random(0), tmp_path / "parts", tmp_path / "whole"
    with Run(*arguments(parts, data, "--save-every", 1)) as run:
        assert run.wait_for("step 3/"), "".join(run.lines)  # the checkpoint of step 1 is written: that of step 2 waited
        threading.Event().wait(random_.uniform(0, 0.2))
        os.kill(random_.choice(run.ranks()), signal.SIGKILL)
        assert run.wait_for("resuming after step"), "".join(run.lines)
        assert run.wait_for("step 5/"), "".join(run.lines)
        run.process.send_signal(signal.SIGTERM)  # to torchrun, which passes it on
        assert run.wait_for("preempted: saved"), "".join(run.lines)
        run.process.communicate()  # torchrun's own status says that it was asked to end
    assert "preempted: saved" in "".join(ranks2.run(_stopped, 9, *arguments(parts, data)))
    assert "resuming after step" in on_ranks(ranks2, EXAMPLE, *arguments(parts, data))
    on_ranks(ranks2, EXAMPLE, *arguments(whole, data))
    assert _numbers(parts) == _numbers(whole)


@pytest.mark.slow
def test_a_reproducible_run_ends_with_the_files_of_one_rank(ranks1, ranks2, data, tmp_path):
    """A reproducible run on 2 ranks and then on 1 ends with the files of a run on 1."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    on_ranks(ranks1, EXAMPLE, *arguments(whole, data, *CONFIG))
    assert "resuming after step" not in "".join(ranks2.run(_stopped, 4, *arguments(parts, data, *CONFIG)))
    printed = on_ranks(ranks1, EXAMPLE, *arguments(parts, data, *CONFIG))
    changes = ["after step 5: ranks 2 -> 1, gradient_accumulation_steps 2 -> 4, train_batch_size is still 16"]
    assert f"resuming after step 5\n{changes[0]}\n" in printed
    assert json.loads((parts / "losses.json").read_text())["changes"] == changes
    for name in ("losses", "grad_norms", "num_tokens"):
        assert _numbers(parts)[name] == _numbers(whole)[name]
    weights = sorted(path.name for path in (whole / "model").glob("*.safetensors"))
    assert weights
    for name in weights:
        assert (parts / "model" / name).read_bytes() == (whole / "model" / name).read_bytes()

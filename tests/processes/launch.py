"""Runs a script under torchrun, or a module, with a bound, leaving no process behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(*arguments, ranks=2, timeout_s=240, cwd=ROOT):
    """Return what the ranks printed; raise with it if the exit status is not 0."""
    return module("torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *arguments,
                  timeout_s=timeout_s, cwd=cwd)  # fmt: skip


def module(*arguments, timeout_s=240, cwd=ROOT):
    """Return what `python -m` printed; raise with it if the exit status is not 0."""
    process = subprocess.Popen(
        [sys.executable, "-m", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        # On the CPU everywhere: a machine may have fewer GPUs than ranks.
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,  # so that the ranks can be ended together
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"no end after {timeout_s} s:\n{output}") from None
    assert process.returncode == 0, output
    return output

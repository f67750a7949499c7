"""Runs a script alone, under torchrun or on the fixtures' ranks, or a module. Bounded; no process is left behind."""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]


def environment(**values):
    """Return the environment of a script: zeroamp is found uninstalled. No rank and no hash seed is inherited."""
    of_ranks = ("RANK", "WORLD_SIZE", "PYTHONHASHSEED")
    inherited = {name: value for name, value in os.environ.items() if name not in of_ranks}
    search_path = os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH")]))
    # On the CPU everywhere: a machine may have fewer GPUs than ranks.
    mine = {"OMP_NUM_THREADS": "1", "PYTHONPATH": search_path, "CUDA_VISIBLE_DEVICES": ""}
    return {name: str(value) for name, value in (inherited | mine | values).items()}


def write_sums(path):
    """Write 200 questions and answers, as `--data` of the fine-tuning example, and return the path."""
    pairs = [(a, b) for a in range(20) for b in range(10)]
    lines = [{"question": f"What is {a} plus {b}?", "answer": f"{a} plus {b} is {a + b}."} for a, b in pairs]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def completed(*arguments, cwd=ROOT, **variables):
    """Return the `CompletedProcess` of `python`, with both outputs apart, whatever its exit status is."""
    command = [sys.executable, *map(str, arguments)]
    options = {"capture_output": True, "text": True, "timeout": 240, "cwd": cwd}
    return subprocess.run(command, check=False, env=environment(**variables), **options)


def torchrun(*arguments, ranks=2, timeout_s=240, cwd=ROOT):
    """Return what the ranks printed; raise with it if the exit status is not 0."""
    return module("torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *arguments,
                  timeout_s=timeout_s, cwd=cwd)  # fmt: skip


def module(*arguments, timeout_s=240, cwd=ROOT):
    """Return what `python -m` printed; raise with it if the exit status is not 0."""
    return script("-m", *arguments, timeout_s=timeout_s, cwd=cwd)


def script(*arguments, timeout_s=240, cwd=ROOT):
    """Return what `python` printed; raise with it if the exit status is not 0."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env=environment(),
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


def on_ranks(ranks, path, *arguments):
    """Return what a script prints on ranks of a fixture, which have imported torch already."""
    return "".join(ranks.run(as_rank, ROOT / path, *map(str, arguments)))


def as_rank(path, *arguments):
    """Run a script in the place of torchrun's process of this rank, and return what it prints."""
    import torch.distributed as dist

    from tests.processes.trainer import forget_accelerate

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1]]
    dist.broadcast_object_list(ports)
    dist.destroy_process_group()  # the script starts its own, with a store of its own
    if "accelerate" in sys.modules:
        forget_accelerate()
    of_torchrun = {
        "LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], "TORCHELASTIC_RUN_ID": "none",
        "MASTER_PORT": str(ports[0]),
    }  # fmt: skip
    with (
        mock.patch.dict(os.environ, of_torchrun),
        mock.patch.object(sys, "argv", [str(path), *arguments]),
        mock.patch.object(sys, "path", [str(Path(path).parent), *sys.path]),
        warnings.catch_warnings(action="ignore"),
        redirect_stdout(StringIO()) as printed,
    ):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()

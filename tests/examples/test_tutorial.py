"""The commands of docs/tutorial.md run in their order, with a tiny model in the place of the one of the hub."""

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from tests.processes import cli
from tests.processes.launch import ROOT, environment

REQUIRED = ("transformers", "tokenizers", "yaml", "matplotlib", "safetensors", "plotly")
if missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
    pytest.skip(f"the examples extra is not installed: {missing}", allow_module_level=True)

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
TIMEOUT_S = 120


def _blocks(language):
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def _started(command, folder):
    """Start a command of the page in a folder."""
    arguments = command.replace("\\\n", " ").replace("examples/", f"{ROOT}/examples/")
    launcher = f"{sys.executable} -m torch.distributed.run --standalone"
    shell = arguments.replace("torchrun", launcher)
    return subprocess.Popen(
        ["bash", "-c", f"exec {shell}"], cwd=folder, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def _output(command, folder):
    with _started(command, folder) as process:
        text, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, text
    return text


def _of_cli(command):
    """Return what a `zeroamp` command of the page prints in this folder."""
    _, *arguments = shlex.split(command.replace("\\\n", " ").replace("examples/", f"{ROOT}/examples/"))
    code, printed, errors = cli.run(*arguments)
    assert code == 0, errors
    return printed


def _killed_after(command, folder, line):
    """Run a command up to a line of its output, and kill all of its processes."""
    with _started(command, folder) as process:
        seen = []
        for each in process.stdout:
            seen.append(each)
            if each.startswith(line):
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                for pid in (process.pid, *map(int, children)):  # the ranks have sessions of their own
                    os.kill(pid, signal.SIGKILL)
                return
        raise AssertionError("".join(seen))


def _write_model_and_data(folder):
    sys.path.insert(0, str(ROOT / "examples"))
    import _weights

    model, tokenizer = _weights.load_model("tiny", seed=0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    first, _ = (json.loads(line) for line in _blocks("json")[0].splitlines())
    lines = [{**first, "question": f"Is item {index} in stock?"} for index in range(60)]
    Path(folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return first["answer"]


def test_the_page_is_short():
    assert len(PAGE.split()) <= 600


@pytest.mark.slow
@pytest.mark.timeout(4 * TIMEOUT_S)
def test_a_reader_gets_from_data_to_an_answer_through_a_kill(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # `plan` prints its table in one piece
    answer = _write_model_and_data(tmp_path)
    download, plan, train, report = _blocks("bash")
    assert download.startswith("hf download")
    monkeypatch.chdir(tmp_path)
    assert re.search(r"^ +3 +2 .* yes ", _of_cli(plan), re.MULTILINE)
    faster = (("1e-3", "1e-2"), ("--steps 60", "--steps 40"))  # a random model has to learn more than SmolLM2
    for before, after in faster:
        assert before in train
        train = train.replace(before, after)
    two_ranks, one_rank = "--nproc-per-node 2", "--nproc-per-node 1"
    assert two_ranks in train
    assert f"`{one_rank}`" in PAGE
    resume = train.replace(two_ranks, one_rank)
    _killed_after(train, tmp_path, "step 14/")
    output = _output(resume, tmp_path)
    assert re.search(r"^resuming after step [12]0$", output, re.MULTILINE)  # the kill may come later on a busy machine
    assert "ranks 2 -> 1, gradient_accumulation_steps 2 -> 4, train_batch_size is still 16" in output
    assert "held-out loss after step 30" in output
    assert f"after: {answer}" in output
    assert "before" in output
    _of_cli(report)
    assert (tmp_path / "runs" / "tutorial" / "run.html").stat().st_size > 10**6
    with redirect_stdout(StringIO()) as printed:
        exec(compile(_blocks("python")[0], "docs/tutorial.md", "exec"), {})
    assert printed.getvalue().strip() == answer

"""The command `zeroamp plan`."""

import io
import json

import pytest

from tests.processes.cli import NET, run
from tests.processes.training import config
from zeroamp.cli.app import ERASE_LINE, main
from zeroamp.dry_run.gpu_memory import RESERVED_BYTES


@pytest.fixture
def arguments(tmp_path, python_file):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(config(3)))
    net = python_file("net_of_plan.py", NET)
    return ("plan", path, "--model", f"{net}:Net", "--inputs", f"{net}:batch", "--world-size", 8)


def test_it_prints_tables(arguments, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # so that no header is wrapped
    code, out, err = run(*arguments, "--batch", 4, "--seq", 3, "--offload-activations")
    assert (code, err) == (0, "")
    assert "mode autocast, 8 ranks, 1 micro-batch of 4 samples of 3 tokens per rank" in out
    assert "between steps" in out
    assert {"peak", "fits", "traffic", "(host)"} <= set(out.split())


def test_it_speaks_of_batch_and_length_only_where_the_inputs_have_them(arguments, python_file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    image = python_file("image.py", "import torch\ndef batch(batch, seq): return torch.ones(batch, 8)")
    out = run(*arguments, "--inputs", f"{image}:batch", "--batch", 4)[1]
    assert "1 micro-batch of 4 samples per rank, " in out
    same = python_file("same.py", "import torch\ndef batch(batch, seq): return torch.ones(3, 8)")
    out = run(*arguments, "--inputs", f"{same}:batch")[1]
    assert "1 micro-batch per rank, " in out
    assert "largest" not in out
    data = json.loads(run(*arguments, "--inputs", f"{same}:batch", "--json")[1])
    assert (data["is_batched"], data["has_length"], data["stages"][0]["largest_batch"]) == (False, False, None)


def test_it_shows_progress_on_a_terminal(arguments, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    main([*map(str, arguments)])
    shown = terminal.getvalue()
    assert "planning stage 0: tracing a micro-batch of 1 sample\r" in shown
    assert shown.endswith(ERASE_LINE)


def test_options_reach_the_plan(arguments):
    arguments[1].write_text(json.dumps(config(3, zeroamp={"dp_replicate_size": 2})))
    more = ("--gpu", "a100", "--checkpointing")
    code, out, _ = run(*arguments, *more, "--json")
    data = json.loads(out)
    assert code == 0
    assert [(stage["num_replicas"], stage["num_shards"]) for stage in data["stages"]] == [(2, 4)] * 3
    assert data["gpu"] == {"name": "a100", "memory_bytes": 80 * 10**9, "reserved_bytes": RESERVED_BYTES}
    assert data["checkpointing"] is True


def test_the_memory_of_a_gpu_is_a_number_too(arguments):
    code, out, _ = run(*arguments, "--gpu", "1.5", "--json")
    data = json.loads(out)
    assert (code, data["gpu"]["memory_bytes"], data["stages"][0]["fits"]) == (0, 1_500_000_000, False)
    assert "Nothing fits" in run(*arguments, "--gpu", "1.5")[1]


def test_a_loss_is_computed_from_the_output(arguments, python_file):
    text = (
        NET.replace("x.square().mean()", "{'out': x}")
        + "\ndef loss(output):\n    return output['out'].square().mean()\n"
    )
    net = python_file("net_without_a_loss.py", text)
    given = ("plan", arguments[1], "--model", f"{net}:Net", "--inputs", f"{net}:batch", "--world-size", 8)
    code, out, err = run(*given)
    assert (code, out) == (1, "")
    assert "--loss" in err
    assert run(*given, "--loss", f"{net}:loss", "--json")[0] == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--gpu", "h1000"), "or the memory of another GPU in GB (10^9 bytes), but is 'h1000'."),
        (("--model", "some/model"), "hf download some/model config.json --local-dir model"),
        (("--inputs", "no.such:function"), "but importing it raised ModuleNotFoundError"),
        (("--inputs", "json:nothing"), "no attribute 'nothing'"),
    ],
)
def test_a_mistake_in_what_is_planned_exits_with_1(arguments, more, words):
    code, out, err = run(*arguments, *more)
    assert (code, out) == (1, "")
    assert words in err

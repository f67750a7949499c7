"""The command `zeroamp plan`."""

import json

import pytest

from tests.processes.cli import run
from tests.processes.training import config

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

def batch(batch, seq):
    return torch.ones(batch, seq, 8)
"""


@pytest.fixture
def arguments(tmp_path, python_file):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(config(3)))
    net = python_file("net_of_plan.py", NET)
    return ("plan", path, "--model", f"{net}:Net", "--inputs", f"{net}:batch", "--world-size", 8)


def test_it_prints_tables(arguments, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # so that no header is wrapped
    code, out, err = run(*arguments, "--stages", "1,3", "--batch", 4, "--seq", 3)
    assert (code, err) == (0, "")
    assert "mode autocast, 8 ranks, 1 x batch 4 x 3 per rank" in out
    assert "all_to_all" in out
    assert {"peak", "NCCL", "fits", "traffic"} <= set(out.split())


def test_options_reach_the_plan(arguments):
    more = ("--mesh", "dp_replicate=2,dp=4", "--gpu", "a100", "--gpus-per-node", 4, "--checkpointing")
    code, out, _ = run(*arguments, "--stages", "3", *more, "--json")
    data = json.loads(out)
    assert code == 0
    assert [(stage["num_replicas"], stage["num_shards"]) for stage in data["stages"]] == [(2, 4)]
    assert data["gpu"] == {"name": "a100", "memory_bytes": 80 * 10**9}
    assert data["stages"][0]["nccl_bytes"] == 1_060_000_000 + 500_000_000 + 3 * 32 * 14 * 2**20
    assert data["checkpointing"] is True


def test_the_memory_of_a_gpu_is_a_number_too(arguments):
    code, out, _ = run(*arguments, "--stages", "3", "--gpu", "1.5", "--json")
    data = json.loads(out)
    assert (code, data["gpu"]["memory_bytes"], data["stages"][0]["fits"]) == (0, 1_500_000_000, False)
    assert "Nothing fits" in run(*arguments, "--stages", "3", "--gpu", "1.5")[1]


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
        (("--stages", "1,4"), "'4' is not one of 0, 1, 2, 3"),
        (("--batch", 0), "Invalid value for '--batch'"),
    ],
)
def test_a_mistake_in_the_arguments_exits_with_2(arguments, more, words):
    code, out, err = run(*arguments, *more)
    assert (code, out) == (2, "")
    assert words in err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--gpu", "h1000"), "or the memory of another GPU in GB (10^9 bytes), but is 'h1000'."),
        (("--model", "some/model"), "(of a hub's: download it)"),
        (("--mesh", "3x3"), "'3x3'"),
        (("--inputs", "no.such:function"), "Error: --inputs no.such:function: importing it raised ModuleNotFoundError"),
        (("--inputs", "no.py:f"), "Error: --inputs no.py:f does not exist"),
        (("--inputs", "batch"), "It must be package.module:function or path/to/file.py:function."),
        (("--inputs", "json:nothing"), "no attribute 'nothing'"),
    ],
)
def test_a_mistake_in_what_is_planned_exits_with_1(arguments, more, words):
    code, out, err = run(*arguments, *more)
    assert (code, out) == (1, "")
    assert words in err


def test_a_mesh_of_axes_counts_data_ranks(arguments, tmp_path):
    path = tmp_path / "batch.json"
    path.write_text(json.dumps({**config(3), "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}))
    given = ("plan", path, *arguments[2:-2], "--mesh", "dp=4,cp=2", "--seq", 8, "--stages", "3", "--json")
    code, out, err = run(*given)
    assert code == 0
    data = json.loads(out)
    assert (data["world_size"], data["seq"], data["stages"][0]["num_shards"]) == (8, 4, 8)
    assert "leaves out the attention's exchange over the 2 ranks of the context axis" in err


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        ("dp=4,tp=2", "must be a factory with an argument mesh"),
        ("dp=4,cp=3", "--seq 8 must be a multiple of the 3 ranks"),
        ("dp=4,pp=2", "'pp=2'"),
        ("dp=4,dp=2", "'dp=2'"),
        ("dp=0", "'dp=0'"),
    ],
)
def test_meshes_of_axes_that_are_refused(arguments, mesh, text):
    code, _, err = run(*arguments[:-2], "--mesh", mesh, "--seq", 8)
    assert code != 0
    assert text in err


PARALLEL = """
import torch
from tests.models import parallel

def tensor(mesh):
    print("built")
    return parallel.tensor_parallel(parallel.decoder(), mesh["tp"])

def experts(mesh):
    return parallel.expert_parallel(parallel.moe_decoder(mesh["ep"].get_group()), mesh["ep"])

def batch(batch, seq):
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    return tokens, tokens
"""


@pytest.fixture
def parallel_model(tmp_path, python_file):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({**config(3), "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}))
    return path, python_file("parallel_net_of_plan.py", PARALLEL)


@pytest.mark.parametrize(
    ("factory", "mesh", "ranks"), [("tensor", "tp=2,dp=4", (4, 2, 1)), ("experts", "dp=2,ep=2", (4, 1, 2))]
)
def test_a_factory_that_takes_the_mesh_is_planned_on_its_axes(parallel_model, factory, mesh, ranks):
    path, net = parallel_model
    options = ("--model", f"{net}:{factory}", "--inputs", f"{net}:batch", "--mesh", mesh, "--json")
    code, out, _ = run("plan", path, *options, "--seq", 16, "--stages", "0,2,3")
    assert code == 0
    data = json.loads(out)
    assert [stage["stage"] for stage in data["stages"]] == [2, 3]
    assert "is not supported with ZeRO stage 0" in data["refused"]["0"]
    assert {(s["num_shards"], s["num_tensor"], s["num_expert"]) for s in data["stages"]} == {ranks}
    code, out, _ = run("explain", path, *options)
    ledger = json.loads(out)
    assert code == 0
    assert ledger["traffic"] == data["stages"][-1]["traffic"]
    name = "blocks.0.gate.weight" if factory == "tensor" else "blocks.0.experts.up"
    elements = next(row["elements"] for row in ledger["parameters"] if row["parameter"] == name)
    assert elements == {"tensor": 64 * 32 // 2, "experts": 4 * 32 * 64 // 2}[factory]


def test_ranks_are_needed(arguments):
    code, _, err = run(*arguments[:-2])
    assert code != 0
    assert "--world-size or --mesh" in err

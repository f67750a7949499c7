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
    arguments[1].write_text(json.dumps(config(3, zeroamp={"dp_replicate_size": 2})))
    more = ("--gpu", "a100", "--gpus-per-node", 4, "--checkpointing")
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
        (("--gpu", "h1000"), "or the memory of another GPU in GB (10^9 bytes), but is 'h1000'."),
        (("--model", "some/model"), "(of a hub's: download it)"),
        (("--inputs", "no.such:function"), "Error: --inputs no.such:function must be package.module:function or path"),
        (("--inputs", "no.such:function"), "but importing it raised ModuleNotFoundError"),
        (("--inputs", "json:nothing"), "no attribute 'nothing'"),
    ],
)
def test_a_mistake_in_what_is_planned_exits_with_1(arguments, more, words):
    code, out, err = run(*arguments, *more)
    assert (code, out) == (1, "")
    assert words in err


@pytest.mark.parametrize("command", ["explain", "plan"])
def test_axes_need_a_factory_that_takes_the_mesh(arguments, command):
    code, out, err = run(command, *arguments[1:-2], "--mesh", "dp=4,tp=2")
    assert (code, out) == (1, "")
    assert "must be a factory with an argument mesh" in err


PARALLEL = """
import torch
from tests.models import parallel

def tensor(mesh):
    print("built")
    return parallel.tensor_parallel(parallel.decoder(), mesh["tp"])

def plain(mesh):
    return parallel.decoder()

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


def test_context_ranks_shard_but_do_not_count_for_batch_sizes(parallel_model):
    path, net = parallel_model
    options = ("--model", f"{net}:plain", "--inputs", f"{net}:batch", "--mesh", "dp=4,cp=2", "--json")
    code, out, _ = run("plan", path, *options, "--seq", 16, "--stages", "3")
    data = json.loads(out)
    assert (code, data["world_size"], data["batch"]) == (0, 8, 2)
    assert (data["stages"][0]["num_shards"], data["stages"][0]["num_replicas"]) == (8, None)
    assert json.loads(run("explain", path, *options)[1])["traffic"] == data["stages"][0]["traffic"]
    path.write_text(json.dumps(config(3, zeroamp={"reproducible": True})))
    code, out, err = run("explain", path, *options)
    assert (code, out) == (1, "")
    assert "is not supported with zeroamp.reproducible" in err

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


def test_it_prints_tables(arguments):
    code, out, err = run(*arguments, "--stages", "1,3", "--batch", 4, "--seq", 3)
    assert (code, err) == (0, "")
    assert "mode autocast, 8 ranks, 1 x batch 4 x 3 per rank" in out
    assert "all_to_all" in out
    assert "GiB with check" in " ".join(out.split())
    for column in ("init GiB", "sums s", "latency s", "exposed s"):
        assert f"{column}: " in " ".join(out.split())


def test_options_reach_the_plan(arguments, tmp_path):
    pytest.importorskip("matplotlib")
    more = ("--mesh", "2x4", "--gpu", "a100", "--gpus-per-node", 4, "--intra", 100, "--inter", 10, "--checkpointing")
    plot = tmp_path / "memory.png"
    code, out, _ = run(*arguments, "--stages", "3", *more, "--compute-efficiency", 0.5, "--json", "--plot", plot)
    data = json.loads(out)
    assert code == 0
    assert [(stage["num_replicas"], stage["num_shards"]) for stage in data["stages"]] == [(2, 4)]
    assert data["gpu"]["name"] == "a100"
    assert data["network"] == {
        "gpus_per_node": 4,
        "intra_gb_per_s": 100,
        "inter_gb_per_s": 10,
        "ranks_per_node": 4,
        "partial_itemsize": 4,
    }
    assert data["meshes"]["best"] in data["meshes"]["tried"]
    assert data["meshes"]["reason"]
    origin = "compute as given, the others round assumptions, not measurements"
    assert data["efficiency"] == {"compute": 0.5, "memory": 0.8, "network": 0.8, "origin": origin}
    assert data["checkpointing"] is True
    assert plot.exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--mesh", "2by4"), "'2by4' is not RxS"),
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
        (("--gpu", "h1000"), "'h1000'. For another one, in Python: plan_run(..., gpu=zeroamp.Gpu(...))."),
        (("--model", "some/model"), "download its config.json into a folder"),
        (("--mesh", "3x3"), "3x3"),
        (("--inputs", "no.such:function"), "Error: inputs 'no.such:function': importing 'no.such'"),
        (("--inputs", "no.py:f"), "Error: inputs 'no.py:f': there is no file"),
        (("--inputs", "batch"), "Error: inputs 'batch' must be \"package.module:function"),
        (("--inputs", "json:nothing"), "there is no 'nothing' in 'json'"),
    ],
)
def test_a_mistake_in_what_is_planned_exits_with_1(arguments, more, words):
    code, out, err = run(*arguments, *more)
    assert (code, out) == (1, "")
    assert words in err


@pytest.mark.parametrize("name", ["memory.foo", "zero.json/memory.png"])
def test_a_picture_that_cannot_be_written_is_refused_before_the_plan_is_made(arguments, tmp_path, monkeypatch, name):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("zeroamp.dry_run.run_plan.plan_run", lambda *_, **__: pytest.fail("planned"))
    code, out, err = run(*arguments, "--plot", tmp_path / name)
    assert (code, out) == (1, "")
    assert "Error: plot" in err
    assert str(tmp_path / name) in err


def test_a_picture_that_fails_later_costs_the_plot_only(arguments, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", _full)
    code, out, err = run(*arguments, "--stages", "3", "--plot", tmp_path / "memory.png")
    assert code == 1
    assert "Memory of one rank at the peak" in out
    assert "memory.png' cannot be written (No space left on device)" in err


def _full(*_args, **_options):
    raise OSError(28, "No space left on device")


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
    code, out, err = run("plan", path, *options, "--seq", 16, "--stages", "0,2,3")
    assert code == 0
    assert "time of the collectives inside of the model" in err
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

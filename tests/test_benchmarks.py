"""The benchmarks beside the peers: what they count and write, on the tiny model. No time is asserted."""

import importlib.util
import json
import math
from unittest import mock

import pytest
import torch

from benchmarks import step_time
from benchmarks.peers.model import SHAPES, Decoder
from benchmarks.peers.options import Options
from tests.processes.launch import module

CPU = torch.device("cpu")
OPTIONS = Options(model="tiny", batch=2, length=16, rounds=2, warm_up=1)


def _without_deepspeed(measure, options):
    find = importlib.util.find_spec
    with mock.patch("importlib.util.find_spec", lambda name: None if name == "deepspeed" else find(name)):
        return measure(options, CPU)


def _measured_times(options):
    measured = _without_deepspeed(step_time.measure, options)
    bases = ["FSDP2 bf16 reshard"]
    return (
        measured,
        step_time.time_rows(measured, "seconds", bases, options, torch.device("cpu")),
        step_time.traffic_rows(measured),
    )


@pytest.fixture(scope="module")
def times(ranks2):
    return ranks2.run(_measured_times, OPTIONS)


def _numels():
    """Return elements of the tiny model: all, in the blocks' Linears, in the head, in all else."""
    with torch.device("meta"):
        model = Decoder(SHAPES["tiny"], 16)
    total = sum(p.numel() for p in model.parameters())
    in_blocks = sum(p.numel() for p in model.blocks.parameters() if p.ndim > 1)
    head = model.head.weight.numel()
    return total, in_blocks, head, total - in_blocks - head


def _expected():
    """Calls and bytes of one step, of 2 blocks and the root."""
    total, in_blocks, head, fp32 = _numels()
    with torch.device("meta"):
        num_parameters = len(list(Decoder(SHAPES["tiny"], 16).parameters()))
    bf16, fp32_ = torch.bfloat16, torch.float32
    # zeroamp's one collective: loss, norm, a hash, and one number for the use of three parameters.
    statistics = {("all_reduce", torch.float64): (1, 8 * (3 + math.ceil(num_parameters / 3)))}
    own = {("all_gather", fp32_): (1, 4 * fp32), ("all_to_all", fp32_): (1, 4 * fp32), **statistics}
    native = {key: moved for key, moved in own.items() if key[0] != "all_to_all"}
    native["reduce_scatter", fp32_] = (1, 4 * fp32)
    gathered_once = {("all_gather", bf16): (3, 2 * (in_blocks + head))}
    summed = {("all_to_all", bf16): (3, 2 * (in_blocks + head))}
    twice = {("all_gather", bf16): (5, 2 * (2 * in_blocks + head))}
    return {
        "zeroamp 1": {**own, **gathered_once, **summed},
        "zeroamp 2": {**own, **gathered_once, **summed},
        "zeroamp 3": {**own, **twice, **summed},
        "zeroamp 3 live": {**own, **gathered_once, **summed},
        "zeroamp 3 prefetch": {**own, **twice, **summed},
        "zeroamp 3 native": {**native, **twice, ("reduce_scatter", bf16): (3, 2 * (in_blocks + head))},
        "FSDP2 bf16 reshard": {("all_gather", bf16): (6, 4 * total), ("reduce_scatter", bf16): (3, 2 * total)},
        "FSDP2 bf16 no reshard": {("all_gather", bf16): (3, 2 * total), ("reduce_scatter", bf16): (3, 2 * total)},
        "FSDP2 autocast reshard": {("all_gather", fp32_): (6, 8 * total), ("reduce_scatter", fp32_): (3, 4 * total)},
        "FSDP2 autocast no reshard": {("all_gather", fp32_): (3, 4 * total), ("reduce_scatter", fp32_): (3, 4 * total)},
        "DDP autocast": {("all_reduce", fp32_): (1, 4 * total)},
        "no communication": {},
        "FSDP2 bf16 reshard again": {("all_gather", bf16): (6, 4 * total), ("reduce_scatter", bf16): (3, 2 * total)},
    }


def test_every_engine_moves_what_its_formula_says(times):
    for measured, _, _ in times:
        assert measured["traffic"] == _expected()


def test_engines_of_the_same_numerics_train_to_the_same_loss(times):
    losses = times[0][0]["losses"]
    same = ["zeroamp 1", "zeroamp 2", "zeroamp 3", "zeroamp 3 live", "FSDP2 autocast reshard", "DDP autocast"]
    assert len({losses[name] for name in same}) == 1
    assert losses["FSDP2 bf16 reshard"] == losses["FSDP2 bf16 reshard again"] != losses["zeroamp 3"]


@pytest.mark.slow
def test_a_record_has_the_command_and_every_round(tmp_path):
    arguments = ("--model", "tiny", "--length", 16, "--rounds", 3, "--warm-up", 1, "--fake", "--world-size", 8)
    engines = ("--engines", "zeroamp 3,FSDP2 bf16 reshard,DDP autocast", "--out", tmp_path)
    module("benchmarks.step_time", *arguments, *engines, timeout_s=100)
    text, values = (tmp_path / "README.md").read_text(), json.loads((tmp_path / "rounds.json").read_text())
    assert "python -m benchmarks.step_time --model tiny" in text
    assert "8 ranks on a process group that moves nothing" in text
    assert {name: len(mine) for name, mine in values["rounds"].items()} == {"zeroamp 3": 3, "FSDP2 bf16 reshard": 3}
    assert values["not run"] == {"DDP autocast": "not with a fake process group"}
    assert values["versions"]["torch"] == torch.__version__

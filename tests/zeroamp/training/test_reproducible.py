"""`zeroamp.reproducible`: the same bits on any number of ranks, and those of a tree over all micro-batches."""

import pytest
import torch

from tests.oracles import tree_of_micro_batches
from tests.processes import reproducible
from tests.processes.ranks import Ranks
from tests.processes.reproducible import SEED
from tests.processes.training import config, same_bits

NUM_STEPS = 20
CLIP = 0.5


def cfg_of(stage=3, mode="autocast", **more):
    """A reproducible config."""
    cfg = config(stage, dtype=None, clip=CLIP, **more)
    cfg["zeroamp"] = {"reproducible": True, "seed": SEED, **cfg.get("zeroamp", {})}
    if mode == "autocast":
        cfg["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif mode == "bf16":
        cfg["bf16"] = {"enabled": True}
    else:
        cfg["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 6, "hysteresis": 1}
    return cfg


def oracle(name, mode="autocast", *, num_micro_batches=8, num_steps=NUM_STEPS, overflow_at=None):
    """The run in one process, as a `Reproduced`."""
    low = {"autocast": None, "bf16": torch.bfloat16, "fp16": torch.float16}[mode]
    found = tree_of_micro_batches.train(
        lambda: reproducible.build_model(name),
        lambda model, inputs: reproducible.loss(name, model, inputs),
        lambda step, index: reproducible.inputs_of(name, step, index, num_micro_batches),
        num_micro_batches=num_micro_batches,
        num_steps=num_steps,
        make_optimizer=reproducible.adamw,
        autocast=torch.bfloat16 if mode == "autocast" else None,
        low_dtype=low,
        clip=CLIP,
        seed_of=reproducible.seeds,
        scale=256.0 if mode == "fp16" else 1.0,
        growth_interval=6 if mode == "fp16" else 0,
        overflow_at=overflow_at,
    )
    return reproducible.Reproduced(**dict(zip(("losses", "norms", "scales", "parameters"), found, strict=True)))


def check(run, expected):
    """The same losses, norms, loss scales and parameters, bit for bit; nan equals nan."""
    for name in ("losses", "norms", "scales"):
        assert list(map(str, getattr(run, name))) == list(map(str, getattr(expected, name))), name
    assert same_bits(run.parameters, expected.parameters) == []


@pytest.fixture(scope="module")
def ranks1():
    ranks = Ranks(1)
    yield ranks
    ranks.stop()


def runs(ranks_of, sizes, name, cfg, **arguments):
    """Yield the runs of all ranks, for each number of ranks."""
    for size in sizes:
        yield from ranks_of[size].run(reproducible.run, name, cfg, num_steps=NUM_STEPS, **arguments)


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_1_2_and_4_ranks_have_the_bits_of_the_tree(ranks1, ranks2, ranks4, stage):
    ranks_of = {1: ranks1, 2: ranks2, 4: ranks4}
    expected = oracle("dropout")
    for run in runs(ranks_of, (1, 2, 4), "dropout", cfg_of(stage), num_micro_batches=8):
        check(run, expected)

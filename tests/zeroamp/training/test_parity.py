"""Losses, gradient norms and parameters, bit for bit: stages against each other and against the oracle."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import zeroamp
from tests.models.small import Llama, batch
from tests.oracles import one_process
from tests.processes.ranks import Ranks
from tests.processes.training import check_runs, check_same_run, config, same_bits, train, wrapped
from tests.selection import slow_but

NUM_STEPS = 2  # AdamW reads its state from the second one on
CLIP = 0.5  # low enough that every step clips


def _freeze(model):
    for block in model.blocks:
        block.qkv.requires_grad_(False)
        block.norm1.requires_grad_(False)


def _share_linear_across_units(model: Llama):
    model.blocks[1].out = model.blocks[0].out


def _tie_weights_across_units(model: Llama):
    model.blocks[1].down.weight = model.blocks[0].down.weight


def _use_twice(model: Llama):
    model.blocks[2] = model.blocks[0]  # one unit, called twice
    model.blocks[1].norm2 = model.blocks[1].norm1  # one module, called twice in a unit


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training on some ranks, and what is passed to the oracle."""

    model: str = "two_blocks"
    world_size: int = 2
    mesh_shape: tuple[int, int] | None = None
    stages: tuple[int, ...] = (0, 1, 2, 3)
    options: dict[str, Any] = field(default_factory=dict)
    oracle: dict[str, Any] = field(default_factory=dict)
    prepare: Any = None


BF16 = {"dtype": None, "bf16": {"enabled": True}}
FP32 = {"dtype": None}
FP16 = {"dtype": "float16", "fp16": {"loss_scale": 1024}}
CASES = {
    # Communication in bf16, the default, loses nothing: the raw gradients are bf16, and the sum is fp32.
    "autocast": Case(),
    "autocast, conv": Case(model="conv"),
    "autocast, moe": Case(model="moe"),
    "autocast, hf_llama": Case(model="hf_llama", stages=(3,)),
    "autocast, one rank": Case(world_size=1, stages=(0, 3)),
    "autocast in fp16, one rank": Case(
        world_size=1, options=FP16, oracle={"autocast": torch.float16, "loss_scale": 1024.0}
    ),
    "autocast in fp16": Case(stages=(1, 3), options=FP16, oracle={"autocast": torch.float16, "loss_scale": 1024.0}),
    "a group per unit and dtype": Case(model="two_blocks_untied", options={"threshold": 0}),
    "bf16": Case(stages=(0, 3), options=BF16, oracle={"low_model": torch.bfloat16}),
    "fp32": Case(stages=(1, 2), options=FP32, oracle={"autocast": None}),
    "micro-batches accumulated on each rank, reduced once": Case(
        stages=(0, 1), options={"accumulation": 3}, oracle={"accumulation": 3}
    ),
    "micro-batches reduced one by one, accumulated in fp32": Case(
        stages=(2, 3), options={"accumulation": 3}, oracle={"accumulation": 3, "reduce_each": True}
    ),
    "replicas": Case(world_size=4, mesh_shape=(2, 2), stages=(1, 3)),
    # Parameters of 9, 13 and 5 rows over 2 shards: padded shards are added in their places.
    "replicas, micro-batches summed before them": Case(
        model="conv",
        world_size=4,
        mesh_shape=(2, 2),
        stages=(2,),
        options={"accumulation": 3},
        oracle={"accumulation": 3, "reduce_each": True, "num_replicas": 2},
    ),
    "3 ranks": Case(model="encoder", world_size=3, stages=(0, 3)),
    # Another number of shards than a power of two: a tree of each replica's shards, then of the replicas.
    "6 ranks, replicas": Case(
        model="encoder", world_size=6, mesh_shape=(2, 3), stages=(1, 2, 3), oracle={"num_replicas": 2}
    ),
    "8 ranks": Case(model="encoder", world_size=8),
    "8 replicas": Case(model="encoder", world_size=8, mesh_shape=(8, 1), stages=(1, 2, 3)),
    "frozen parameters, left out of the norm": Case(model="two_blocks_untied", stages=(0, 3), prepare=_freeze),
    "modules used twice": Case(model="llama_tied", stages=(0, 3), options={"comm": "fp32"}, prepare=_use_twice),
    # Its blocks run six times, and one of their modules only the last time.
    "units that run again": Case(model="recurrent", stages=(3,), options={"comm": "fp32"}),
    "units that run again, micro-batches": Case(
        model="recurrent",
        stages=(2, 3),
        options={"comm": "fp32", "accumulation": 2},
        oracle={"accumulation": 2, "reduce_each": True},
    ),
    "a Linear of two units": Case(model="two_blocks_untied", stages=(1, 3), prepare=_share_linear_across_units),
    "a weight of two units": Case(model="two_blocks_untied", prepare=_tie_weights_across_units),
}
SLOW = {
    "autocast, conv",
    "autocast, moe",
    "autocast in fp16, one rank",
    "units that run again, micro-batches",
    "a group per unit and dtype",
    "a weight of two units",
    "6 ranks, replicas",
    "8 ranks",
    "8 replicas",
}


def _at_all_stages(case):
    return {
        stage: train(
            case.model,
            config(stage, clip=CLIP, **case.options),
            NUM_STEPS,
            mesh_shape=case.mesh_shape,
            prepare_before=case.prepare,
        )
        for stage in case.stages
    }


@contextmanager
def _ranks(request, world_size):
    """Those of the test session, or others for the time of a test."""
    if world_size in (1, 2, 4, 8):
        yield request.getfixturevalue(f"ranks{world_size}")
        return
    ranks = Ranks(world_size)
    try:
        yield ranks
    finally:
        ranks.stop()


@pytest.mark.parametrize("name", slow_but(CASES, *(CASES.keys() - SLOW)))
def test_all_stages_have_the_bits_of_one_process(request, name):
    case = CASES[name]
    with _ranks(request, case.world_size) as ranks:
        by_rank = ranks.run(_at_all_stages, case)
    oracle = one_process.train(
        case.model, world_size=case.world_size, num_steps=NUM_STEPS, clip=CLIP, prepare=case.prepare, **case.oracle
    )
    check_runs([list(by_stage.values()) for by_stage in by_rank], oracle)


NATIVE = {"zeroamp": {"reduce_accumulate_dtype": "native"}}


def test_stages_2_and_3_agree_on_a_bf16_wire(ranks2):
    """Stages 2 and 3 have the same bits where the backend sums in bf16. Those bits differ from a sum in fp32."""
    cases = (Case(stages=(2, 3), options={"accumulation": 2, **more}) for more in (NATIVE, {}))
    for native, summed in zip(*(ranks2.run(_at_all_stages, case) for case in cases), strict=True):
        check_same_run(native[2], native[3])
        assert same_bits(native[3].parameters, summed[3].parameters) != []


def _reductions(num_forwards, num_backwards):
    """The numbers of reductions of groups by stage, in one or several backwards after several forwards."""
    found = {}
    for stage in (0, 3):
        model = wrapped("recurrent", config(stage, comm="fp32"))
        losses = [model(batch("recurrent", index)) for index in range(num_forwards)]
        if num_backwards == 1:
            sum(losses[:2]).backward()  # the loss does not depend on later forwards
        else:
            for loss in losses[::-1]:
                loss.backward()
        calls = Counter()
        for key, number in zeroamp.traffic(model).calls.items():
            if key.collective != "all_gather":
                calls[key.group] += number
        found[stage] = set(calls.values())
    return found


@pytest.mark.parametrize(("num_forwards", "num_backwards"), [(3, 1), (2, 2)])
def test_each_backward_reduces_each_group_once(ranks2, num_forwards, num_backwards):
    assert ranks2.run(_reductions, num_forwards, num_backwards) == [{0: {num_backwards}, 3: {num_backwards}}] * 2

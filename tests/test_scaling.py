"""The formulae of `benchmarks/scaling.py` beside what is counted."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import zeroamp
from benchmarks.scaling import counted, of_deepspeed, of_fsdp2
from tests.models.small import Llama
from tests.processes.training import config
from zeroamp.dry_run.checks import ranks_at

NUM_RANKS = 6  # pads some parameters


def _plan(stage, **options):
    return zeroamp.build_plan(Llama(tied=False), zeroamp.policy_from_config(config(stage, **options)))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_in_fp32_zeroamp_sends_what_the_formula_says_of_fsdp2(stage, accumulation):
    plan = _plan(stage, dtype=None, accumulation=accumulation, zeroamp={"shard_dim": 0})  # as FSDP2's default
    sent = counted(plan, ranks_at(plan.policy, NUM_RANKS, None), NUM_RANKS)
    # The step's own all-reduce, which only zeroamp has: loss, norm, a hash, and one number for three parameters.
    numbers = 3 + -(-len(plan.params) // 3)
    assert sent - 2 * 8 * numbers * 5 / 6 == pytest.approx(of_fsdp2(plan, NUM_RANKS, 4), rel=1e-12)


def test_deepspeed_by_hand():
    with torch.device("meta"):
        model = nn.ModuleDict({"safe": nn.Linear(1000, 200, bias=False), "other": nn.Embedding(1000, 500)})
        model["small"] = nn.LayerNorm(10, bias=False)
    plan = zeroamp.build_plan(model, zeroamp.policy_from_config(config(accumulation=2)), "Linear")
    found = [of_deepspeed(replace(plan, policy=plan.policy.replace(stage=stage)), 2) for stage in range(4)]
    num_params, on_wire = 200_000 + 500_000 + 10, 2 * 200_000 + 4 * 500_000 + 4 * 10
    of_micro_batch = 3 * (2 * 200_000 + 4 * 500_000) + 4 * 10
    assert [2 * sent for sent in found] == [  # half of it is another rank's
        8 * num_params,
        2 * on_wire + 4 * num_params,
        4 * on_wire + 4 * num_params,
        2 * of_micro_batch + 4 * 10,
    ]

"""`zeroamp.overrides` in training: bit for bit plain torch, at every stage, and the ledger and the traffic agree."""

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.prepared import checkpoint_inside
from tests.models.small import batch
from tests.oracles import one_process
from tests.oracles import overrides as oracle
from tests.processes.training import config, same_bits, train

NAME = "llama_untied"
NUM_STEPS = 3
BF16 = torch.bfloat16
NORMS = [f"blocks.{index}.norm{which}.weight" for index in range(3) for which in (1, 2)] + ["norm.weight"]


def _verify(model):
    verified = zeroamp.explain(model).verify(model, batch(NAME, dist.get_rank()))
    assert verified.is_traffic_as_planned


def _all_stages(options, stages, prepare=_verify):
    """Return {stage: Run} of this rank; `prepare` is called with the wrapped model."""
    cfgs = {stage: config(stage, **options) for stage in stages}
    return {stage: train(NAME, cfg, NUM_STEPS, prepare=prepare) for stage, cfg in cfgs.items()}


def check(by_rank, expected):
    losses, parameters = expected
    for rank, runs in enumerate(by_rank):
        for run in runs.values():
            assert run.losses == [ranks[rank] for ranks in losses]
            assert same_bits(run.parameters, parameters) == []


def options_of(*overrides, **options):
    return {**options, "zeroamp": {"overrides": list(overrides)}}


CASES = {
    "fp32 head": (
        options_of({"modules": "head", "compute": "fp32", "communication": "fp32"}),
        (0, 1, 2, 3),
        {"in_fp32": ["head"]},
    ),
    "fp32 Linear inside of a unit, bf16 gradients": (
        options_of({"modules": ["blocks.1.out", "norm"], "compute": "fp32", "communication": "bf16"}),
        (1, 3),
        {"in_fp32": ["blocks.1.out", "norm"], "sent_as": {"blocks.1.out.weight": BF16, "norm.weight": BF16}},
    ),
    "some norms send bf16: two model-wide groups": (
        options_of({"modules": "norm2", "communication": "bf16"}),
        (1, 2),
        {"sent_as": {fqn: BF16 for fqn in NORMS if "norm2" in fqn}},
    ),
    "the embedding is all-gathered in bf16": (
        options_of({"modules": "torch.nn.Embedding", "param": "bf16"}),
        (0, 3),
        {"gathered_low": ["embed.weight"]},
    ),
    "Linears of no list": (
        options_of(
            {"modules": "torch.nn.Linear", "compute": "bf16"},
            dtype=None,
            torch_autocast={"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []},
        ),
        (0, 3),
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_plain_torch(ranks2, case):
    options, stages, written_out = CASES[case]
    expected = oracle.train(NAME, world_size=2, num_steps=NUM_STEPS, **written_out)
    check(ranks2.run(_all_stages, options, stages), expected)


def test_a_region_has_these_bits_too_in_blocks_that_are_computed_again(ranks2):
    options, _, written_out = CASES["fp32 Linear inside of a unit, bf16 gradients"]
    expected = oracle.train(NAME, world_size=2, num_steps=NUM_STEPS, **written_out)
    check(ranks2.run(_all_stages, options, [3], checkpoint_inside), expected)


@pytest.mark.parametrize("stage", [1, 2])
def test_micro_batches_are_summed_before_or_after_the_cast(ranks2, stage):
    """Micro batches are summed before or after the cast to the communication dtype."""
    options = options_of({"modules": "RMSNorm", "communication": "bf16"}, accumulation=2, comm="fp32")
    written_out = {"sent_as": dict.fromkeys(NORMS, BF16), "accumulation": 2, "reduce_each": stage == 2}
    losses, _, parameters = one_process.train(NAME, world_size=2, num_steps=NUM_STEPS, **written_out)
    check(ranks2.run(_all_stages, options, [stage]), (losses, parameters))

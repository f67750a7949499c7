"""What reaches the process group: kinds, dtypes, counts and sizes, per stage. One step of three micro-batches."""

import pytest
import torch

import zeroamp
from tests.measuring.collectives import Collectives
from tests.models.small import Llama, ThreeUnits, batch, loss_of
from tests.processes.training import config, wrapped
from tests.selection import slow_but

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
MICRO_BATCHES = 3
SMALL = 6 * 32  # the norms' weights of three blocks
BLOCK = 3 * (3 * 32 * 32 + 32 * 32 + 4 * 32 * 32 + 2 * 32 * 32 + 32)  # the Linear layers of three blocks
ROOT = 80 * 32 + 32  # the tied embedding and the last norm


def _count(model, inputs, micro_batches):
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with Collectives() as collectives:
        for _ in range(micro_batches):
            step.backward(loss_of(model, inputs))
            step.step()
    return dict(collectives.calls), dict(collectives.elements)


def _three_units(stage):
    cfg = config(stage, dtype=None, accumulation=MICRO_BATCHES)
    torch.manual_seed(0)
    model = zeroamp.wrap_model(ThreeUnits(), zeroamp.policy_from_config(cfg))
    return _count(model, torch.ones(2, 8), MICRO_BATCHES)


def _llama(stage, accumulation, options):
    model = wrapped("llama_tied", config(stage, accumulation=accumulation, **options))
    return _count(model, batch("llama_tied", 0), accumulation)


# One gather more than units x passes: FSDP2 keeps its record of the forward order until the last backward, so the first
# unit of the last micro-batch prefetches the last unit of the one before. Where the root owns parameters, as in any
# language model, that prefetch meets the root, which is still gathered, and costs nothing (see the LLaMA counts below).
@pytest.mark.parametrize(("stage", "gathers", "reduces"), [(1, 4, 3), (2, 4, 9), (3, 19, 9)])
def test_three_units_and_three_micro_batches_cost_what_each_stage_promises(ranks2, stage, gathers, reduces):
    calls, _ = ranks2.run(_three_units, stage)[0]
    assert calls == {("all_gather", FP32): gathers, ("all_to_all", FP32): reduces, ("all_reduce", FP64): 1}


def test_stage_0_gathers_nothing_and_reduces_once(ranks2):
    calls, elements = ranks2.run(_llama, 0, MICRO_BATCHES, {})[0]
    # The two halves of each all-reduce; the only all-gathers.
    assert calls == {("all_to_all", FP32): 5, ("all_gather", FP32): 5, ("all_reduce", FP64): 1}
    assert elements["all_to_all", FP32] == elements["all_gather", FP32] == BLOCK + SMALL + ROOT


@pytest.mark.parametrize(("stage", "gathers", "reduces"), [(1, 1, 1), (2, 1, 3), (3, 6, 3)])
def test_safe_parameters_travel_in_bf16_and_the_others_in_fp32(ranks2, stage, gathers, reduces):
    calls, elements = ranks2.run(_llama, stage, MICRO_BATCHES, {})[0]
    root_gathers = MICRO_BATCHES if stage == 3 else 1  # gathered again in every micro-batch at stage 3
    assert calls == {
        ("all_gather", BF16): 3 * gathers,
        ("all_gather", FP32): root_gathers + 1,  # the model-wide group once per step, whatever the stage
        ("all_to_all", BF16): 3 * reduces,
        ("all_to_all", FP32): 2 * reduces,
        ("all_reduce", FP64): 1,  # norm and loss
    }
    assert elements["all_gather", BF16] == gathers * BLOCK
    assert elements["all_gather", FP32] == root_gathers * ROOT + SMALL
    assert elements["all_to_all", BF16] == reduces * BLOCK
    assert elements["all_to_all", FP32] == reduces * (ROOT + SMALL)


def test_stage_3_costs_one_gather_and_one_reduction_more_than_one_dtype_would(ranks2):
    calls, _ = ranks2.run(_llama, 3, 1, {})[0]
    assert calls["all_gather", BF16] + calls["all_gather", FP32] == 8  # 2 per block, the root, the model-wide group
    assert calls["all_to_all", BF16] + calls["all_to_all", FP32] == 5


def test_with_a_threshold_of_zero_every_unit_gathers_its_fp32_parameters_itself(ranks2):
    calls, elements = ranks2.run(_llama, 3, 1, {"threshold": 0})[0]
    assert calls["all_gather", BF16] == 6
    assert calls["all_gather", FP32] == 7
    assert calls["all_to_all", FP32] == 4
    assert elements["all_gather", FP32] == 2 * SMALL + ROOT


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_communication_data_type_fp32_is_honoured_with_bf16_gathers(ranks2, stage):
    calls, _ = ranks2.run(_llama, stage, 1, {"comm": "fp32"})[0]
    assert calls["all_to_all", FP32] == 5
    assert ("all_to_all", BF16) not in calls
    assert calls["all_gather", BF16] == (6 if stage == 3 else 3)


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_native_accumulation_uses_the_backends_own_reduction(ranks2, stage):
    calls, _ = ranks2.run(_llama, stage, 1, {"zeroamp": {"reduce_accumulate_dtype": "native"}})[0]
    kind = "all_reduce" if stage == 0 else "reduce_scatter"
    assert calls[kind, BF16] == 3
    assert calls[kind, FP32] == 2


def test_the_model_has_the_sizes_that_the_counts_assume():
    named = dict(Llama(tied=True).named_parameters())
    linear = sum(p.numel() for n, p in named.items() if n.startswith("blocks") and "norm" not in n)
    norms = sum(p.numel() for n, p in named.items() if n.startswith("blocks") and "norm" in n)
    assert (linear, norms, sum(p.numel() for p in named.values())) == (BLOCK, SMALL, BLOCK + SMALL + ROOT)

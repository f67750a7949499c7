"""What reaches the process group: kinds, dtypes, counts and sizes, per stage; and that zeroamp counts just these."""

from collections import Counter

import pytest
import torch

import zeroamp
from tests.measuring.collectives import Collectives
from tests.models.small import batch, loss_of
from tests.processes.training import config, wrapped

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


def _llama(stage, accumulation, options):
    model = wrapped("llama_tied", config(stage, accumulation=accumulation, **options))
    return _count(model, batch("llama_tied", 0), accumulation)


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


NATIVE = {"zeroamp": {"reduce_accumulate_dtype": "native"}}


@pytest.mark.parametrize(
    ("stage", "options", "expected"),
    [
        # Every unit gathers its fp32 parameters itself.
        (3, {"threshold": 0}, {("all_gather", BF16): 6, ("all_gather", FP32): 7, ("all_to_all", FP32): 4}),
        (3, {"comm": "fp32"}, {("all_gather", BF16): 6, ("all_to_all", FP32): 5, ("all_to_all", BF16): 0}),
        (0, NATIVE, {("all_reduce", BF16): 3, ("all_reduce", FP32): 2, ("all_to_all", FP32): 0}),
        (3, NATIVE, {("reduce_scatter", BF16): 3, ("reduce_scatter", FP32): 2, ("all_to_all", BF16): 0}),
    ],
    ids=["threshold of 0", "fp32 communication", "native, stage 0", "native"],
)
def test_what_options_send_otherwise(ranks2, stage, options, expected):
    calls, _ = ranks2.run(_llama, stage, 1, options)[0]
    assert {key: calls.get(key, 0) for key in expected} == expected


def _both_counts(options, mesh_shape):
    """Return (calls, bytes) that zeroamp counts, and those that reach the process group."""
    model = wrapped("llama_untied", config(**options), mesh_shape=mesh_shape)
    observed, elements = _count(model, batch("llama_untied", 0), options.get("accumulation", 1))
    calls, num_bytes = Counter(), Counter()
    for (kind, dtype), (num_calls, size) in zeroamp.traffic(model).by_dtype().items():
        # Replicas are summed in tree order: an all-to-all, and an all-gather of the sums.
        is_ours = kind == "all_reduce" and dtype == FP32
        for half in ("all_to_all", "all_gather") if is_ours else (kind,):
            calls[half, dtype] += num_calls
            num_bytes[half, dtype] += size
    return (calls, num_bytes), (observed, {key: count * key[1].itemsize for key, count in elements.items()})


@pytest.mark.parametrize(
    ("options", "mesh_shape"),
    [
        ({"stage": 0}, None),
        ({"stage": 1, "accumulation": 2}, None),
        ({"stage": 3, "threshold": 0}, None),
        ({"stage": 3, **NATIVE}, None),
        ({"stage": 3}, (2, 1)),
    ],
    ids=str,
)
def test_calls_and_bytes_are_counted_as_they_reach_the_process_group(ranks2, options, mesh_shape):
    counted, observed = ranks2.run(_both_counts, options, mesh_shape)[0]
    assert counted == observed
    assert counted[0].total() > 5

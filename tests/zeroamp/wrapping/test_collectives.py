"""What reaches the process group: kinds, dtypes, counts and sizes, per stage; and that zeroamp counts just these."""

from collections import Counter

import pytest
import torch

import zeroamp
from benchmarks.peers.counting import Collectives
from tests.processes.training import SmallTraining, config

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
MICRO_BATCHES = 3
SMALL = 6 * 32  # the norms' weights of three blocks
BLOCK = 3 * (3 * 32 * 32 + 32 * 32 + 4 * 32 * 32 + 2 * 32 * 32 + 32)  # the Linear layers of three blocks
ROOT = 80 * 32 + 32  # the tied embedding and the last norm
NATIVE = {"zeroamp": {"reduce_accumulate_dtype": "native"}}


def _counted(stage, accumulation, options, mesh_shape=None):
    """Return the calls and elements that reach the process group in an optimizer step; zeroamp counts the same."""
    training = SmallTraining(
        config(stage, accumulation=accumulation, **options), name="llama_tied", mesh_shape=mesh_shape
    )
    with Collectives() as collectives:
        for _ in range(accumulation):
            training.step()
    calls, num_bytes = Counter(), Counter()
    for (kind, dtype), (num_calls, size) in zeroamp.traffic(training.model).by_dtype().items():
        # Replicas are summed in tree order, unless in native dtypes: an all-to-all, and an all-gather of the sums.
        is_ours = kind == "all_reduce" and dtype == FP32 and options != NATIVE
        for half in ("all_to_all", "all_gather") if is_ours else (kind,):
            calls[half, dtype] += num_calls
            num_bytes[half, dtype] += size
    assert calls == collectives.calls
    assert num_bytes == collectives.num_bytes
    return dict(collectives.calls), {key: size // key[1].itemsize for key, size in num_bytes.items()}


def test_stage_0_gathers_nothing_and_reduces_once(ranks2):
    calls, elements = ranks2.run(_counted, 0, MICRO_BATCHES, {})[0]
    # The two halves of each all-reduce; the only all-gathers.
    assert calls == {("all_to_all", FP32): 5, ("all_gather", FP32): 5, ("all_reduce", FP64): 1}
    assert elements["all_to_all", FP32] == elements["all_gather", FP32] == BLOCK + SMALL + ROOT


@pytest.mark.parametrize(("stage", "gathers", "reduces"), [(1, 1, 1), (2, 1, 3), (3, 6, 3)])
def test_safe_parameters_travel_in_bf16_and_the_others_in_fp32(ranks2, stage, gathers, reduces):
    """Stage 1 reduces sums of micro-batches: they are sent in fp32."""
    calls, elements = ranks2.run(_counted, stage, MICRO_BATCHES, {})[0]
    root_gathers = MICRO_BATCHES if stage == 3 else 1  # gathered again in every micro-batch at stage 3
    reductions = {FP32: 5 * reduces} if stage == 1 else {BF16: 3 * reduces, FP32: 2 * reduces}
    assert calls == {
        ("all_gather", BF16): 3 * gathers,
        ("all_gather", FP32): root_gathers + 1,  # the model-wide group once per step, whatever the stage
        **{("all_to_all", dtype): number for dtype, number in reductions.items()},
        ("all_reduce", FP64): 1,  # norm and loss
    }
    assert elements["all_gather", BF16] == gathers * BLOCK
    assert elements["all_gather", FP32] == root_gathers * ROOT + SMALL
    assert elements.get(("all_to_all", BF16), 0) == (reduces * BLOCK if stage > 1 else 0)
    assert sum(elements.get(("all_to_all", dtype), 0) for dtype in reductions) == reduces * (BLOCK + ROOT + SMALL)


@pytest.mark.parametrize(
    ("stage", "options", "mesh_shape", "expected"),
    [
        # Every unit gathers its fp32 parameters itself.
        (3, {"threshold": 0}, None, {("all_gather", BF16): 6, ("all_gather", FP32): 7, ("all_to_all", FP32): 4}),
        (3, {"comm": "fp32"}, None, {("all_gather", BF16): 6, ("all_to_all", FP32): 5, ("all_to_all", BF16): 0}),
        (0, NATIVE, None, {("all_reduce", BF16): 3, ("all_reduce", FP32): 2, ("all_to_all", FP32): 0}),
        (3, NATIVE, None, {("reduce_scatter", BF16): 3, ("reduce_scatter", FP32): 2, ("all_to_all", BF16): 0}),
        (3, {}, (2, 1), {("all_to_all", FP32): 5, ("all_gather", FP32): 5, ("all_reduce", FP64): 1}),
    ],
    ids=["threshold of 0", "fp32 communication", "native, stage 0", "native", "replicas"],
)
def test_what_options_send_otherwise(ranks2, stage, options, mesh_shape, expected):
    calls, _ = ranks2.run(_counted, stage, 1, options, mesh_shape)[0]
    assert {key: calls.get(key, 0) for key in expected} == expected

"""What zeroamp counts is what reaches the process group, and counting changes nothing."""

from collections import Counter

import pytest
import torch

import zeroamp
from tests.measuring.collectives import Collectives
from tests.models.small import batch, loss_of
from tests.processes.training import config, wrapped

NAME = "llama_untied"


def _both_counts(options, mesh_shape=None):
    model = wrapped(NAME, config(**options), mesh_shape=mesh_shape)
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with Collectives() as collectives:
        for _ in range(options.get("accumulation", 1)):
            step.backward(loss_of(model, batch(NAME, 0)))
            step.step()
    calls, num_bytes = Counter(), Counter()
    for (kind, dtype), (num_calls, size) in zeroamp.traffic(model).by_dtype().items():
        # Replicas are summed in tree order: an all-to-all, and an all-gather of the sums.
        is_ours = kind == "all_reduce" and dtype == torch.float32
        for half in ("all_to_all", "all_gather") if is_ours else (kind,):
            calls[half, dtype] += num_calls
            num_bytes[half, dtype] += size
    observed_bytes = {key: n * key[1].itemsize for key, n in collectives.elements.items()}
    return calls == dict(collectives.calls), num_bytes == observed_bytes, sum(calls.values())


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 0},
        {"stage": 1, "accumulation": 2},
        {"stage": 2, "accumulation": 2, "comm": "fp32"},
        {"stage": 3, "threshold": 0},
        {"stage": 3, "zeroamp": {"reduce_accumulate_dtype": "native"}},
        {"stage": 3, "dtype": None, "bf16": {"enabled": True}},
    ],
    ids=str,
)
def test_calls_and_bytes_are_those_that_reach_the_process_group(ranks2, options):
    same_calls, same_bytes, num_calls = ranks2.run(_both_counts, options)[0]
    assert (same_calls, same_bytes) == (True, True)
    assert num_calls > 5


@pytest.mark.parametrize("mesh_shape", [(1, 2), (2, 1)])
def test_the_all_reduce_over_replicas_is_counted_too(ranks2, mesh_shape):
    same_calls, same_bytes, _ = ranks2.run(_both_counts, {"stage": 3}, mesh_shape)[0]
    assert (same_calls, same_bytes) == (True, True)


def _per_group():
    model = wrapped(NAME, config(3))
    model(batch(NAME, 0)).backward()
    return zeroamp.traffic(model).num_bytes


def test_bytes_are_counted_per_group(ranks2):
    num_bytes = ranks2.run(_per_group)[0]
    block = 3 * 32 * 32 + 32 * 32 + 4 * 32 * 32 + 2 * 32 * 32 + 32
    assert num_bytes["all_gather", torch.bfloat16, "blocks.1"] == 2 * block * 2  # forward and backward, 2 bytes each
    assert num_bytes["all_to_all", torch.bfloat16, "blocks.1"] == block * 2


def _replica_dtypes(options):
    model = wrapped(NAME, config(3, **options), mesh_shape=(2, 2))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step.backward(loss_of(model, batch(NAME, 0)))
    step.step()
    keys = zeroamp.traffic(model).calls
    return {key.dtype for key in keys if key.collective == "all_reduce" and key.group.startswith("blocks")}


NATIVE = {"zeroamp": {"reduce_accumulate_dtype": "native"}}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        (NATIVE, torch.bfloat16),
        pytest.param({**NATIVE, "dtype": "float16"}, torch.float32, marks=pytest.mark.slow),
    ],
    ids=["bf16 summed in fp32", "native bf16", "native fp16"],
)
def test_replicas_are_averaged_in_fp32_unless_a_native_bf16_wire_is_asked_for(ranks4, options, dtype):
    assert ranks4.run(_replica_dtypes, options)[0] == {dtype}

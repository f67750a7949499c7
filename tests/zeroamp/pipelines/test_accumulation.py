"""`data_types.grad_accum_dtype` in a pipeline: each rank rounds its sum after each micro-batch, as one process does."""

import pytest
import torch

from tests.processes import pipelines
from tests.selection import SUMS_ARE_IN_FP32
from tests.zeroamp.pipelines.comparison import BOUND, DATA, LR, STEPS, check, config, expected, needs

on_autograds_sums = pytest.mark.skipif(not SUMS_ARE_IN_FP32, reason="from torch 2.15 on")
on_own_sums = pytest.mark.skipif(SUMS_ARE_IN_FP32, reason="refused from torch 2.15 on, whose autograd sums")
BF16 = {"data_types": {"grad_accum_dtype": "bf16"}}
REPLICAS = {"pp": 2, "dp_replicate": 2, "dp_shard": 1}


@on_own_sums
@pytest.mark.parametrize(
    ("name", "stage", "mode", "axes"),
    [
        ("1F1B", 0, "bf16", DATA),
        ("GPipe", 1, "autocast", DATA),
        ("Interleaved1F1B", 2, "bf16", REPLICAS),
        ("1F1B", 3, "fp32", DATA),
        ("ZBVZeroBubble", 3, "bf16", DATA),
    ],
)
def test_bf16_sums_are_those_of_one_process(ranks4, name, stage, mode, axes):
    needs(name)
    cfg = config(stage, mode, **BF16)
    runs = ranks4.run(pipelines.train, name, cfg, axes, STEPS, max_norm=1.0, lr=LR)
    wanted = expected(name, mode, accumulate=torch.bfloat16)
    check(runs, wanted, 2, BOUND[mode])
    in_fp32 = expected(name, mode)
    assert not torch.equal(in_fp32.parameters["head.weight"], wanted.parameters["head.weight"])


@on_own_sums
@pytest.mark.parametrize("accumulate", ["fp16", "bf16"])
def test_sums_of_scaled_gradients(ranks4, accumulate):
    cfg = config(2, "fp16", gradient_clipping=1.0, data_types={"grad_accum_dtype": accumulate})
    found = ranks4.run(pipelines.train_by_steps, "1F1B", cfg, DATA, STEPS, lr=LR)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[accumulate]
    wanted = expected("1F1B", "fp16", accumulate=dtype, loss_scale=2.0**10)
    for run, reports in found:
        assert [report.skipped for report in reports] == [False] * STEPS
        for fqn, value in run.parameters.items():
            assert torch.equal(value, wanted.parameters[fqn]), fqn


@on_own_sums
def test_bf16_sums_are_sent_in_bf16(ranks4):
    """They are not rounded then, and take half of the bytes of fp32 sums."""
    for run in ranks4.run(pipelines.train, "1F1B", config(2, "bf16", **BF16), DATA, 1, max_norm=1.0, lr=LR):
        calls = {key: number for key, number in run.calls.items() if key[3] != "step" and number}
        assert {dtype for _, _, dtype, _ in calls} == {"torch.bfloat16"}


@on_autograds_sums
def test_other_sums_are_refused_where_autograd_sums(ranks4):
    with pytest.raises(AssertionError, match="WrapError: .*grad_accum_dtype bf16 on torch 2.15"):
        ranks4.run(pipelines.train, "1F1B", config(2, "bf16", **BF16), DATA, 2, max_norm=1.0, lr=LR)

"""The dtypes and collectives that planning decides for a group, on the ranks that are given."""

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.processes.training import config
from zeroamp.planning.group_dtypes import GroupKey, group_dtypes
from zeroamp.planning.mesh import Ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM
NATIVE = {"zeroamp": {"reduce_accumulate_dtype": "native"}}
SHARDS, REPLICAS, BOTH = Ranks(num_shards=4), Ranks(num_shards=1, num_replicas=4), Ranks(num_shards=2, num_replicas=2)
SUMS_IN_FP16 = {"data_types": {"grad_accum_dtype": "fp16"}, "accumulation": 2}


@pytest.mark.parametrize(
    ("communication", "options", "ranks", "expected"),
    [
        (BF16, {"stage": 3}, SHARDS, ("all_to_all", FP32, SUM, None, BF16)),
        (BF16, {"stage": 3}, BOTH, ("all_to_all", FP32, SUM, FP32, BF16)),
        (BF16, {"stage": 3}, REPLICAS, (None, FP32, AVG, FP32, FP32)),
        (BF16, {"stage": 3, **NATIVE}, SHARDS, ("reduce_scatter", BF16, AVG, None, BF16)),
        (BF16, {"stage": 3, **NATIVE}, BOTH, ("reduce_scatter", BF16, AVG, BF16, BF16)),
        (FP16, {"stage": 3, "dtype": "float16", **NATIVE}, SHARDS, ("reduce_scatter", FP16, SUM, None, FP16)),
        (FP16, {"stage": 3, "dtype": "float16", **NATIVE}, BOTH, ("reduce_scatter", FP32, SUM, FP32, FP16)),
        (FP32, {"stage": 1, "dtype": "float16", **SUMS_IN_FP16}, BOTH, ("all_to_all", FP32, SUM, FP32, FP32)),
        (
            BF16,
            {"stage": 1, "dtype": "float16", **SUMS_IN_FP16, **NATIVE},
            SHARDS,
            ("reduce_scatter", BF16, SUM, None, BF16),
        ),
        (BF16, {"stage": 3}, Ranks(num_shards=1), (None, FP32, SUM, None, BF16)),
    ],
    ids=str,
)
def test_the_reduction_of_a_group(communication, options, ranks, expected):
    policy = zeroamp.policy_from_config(config(**options))
    dtypes = group_dtypes(GroupKey(FP32, communication, communication), policy, ranks)
    found = dtypes.reduction, dtypes.reduce, dtypes.reduction_op, dtypes.replica, dtypes.between_ranks
    assert found == expected
    assert dtypes.all_gathers == (dtypes.reduction is not None)

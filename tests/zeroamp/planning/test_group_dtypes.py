"""The dtypes and collectives that planning decides for a group, on the ranks that are given."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.processes.training import config
from zeroamp.planning.group_dtypes import GroupKey, group_dtypes, param_dtypes
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.precisions import Precision

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
            {"stage": 1, "dtype": "float16", "comm": "bf16", **SUMS_IN_FP16, **NATIVE},
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


IN_BF16 = {"data_types": {"grad_accum_dtype": "bf16"}, "accumulation": 2}
IN_FP16 = {"dtype": "float16", "data_types": {"grad_accum_dtype": "fp16"}, "accumulation": 2}


@pytest.mark.parametrize(
    ("options", "override", "single", "of_sums", "in_step"),
    [
        ({"stage": 1}, {}, BF16, FP32, BF16),
        ({"stage": 1, "accumulation": 2}, {}, BF16, FP32, FP32),
        ({"stage": 2, "accumulation": 2}, {}, BF16, FP32, BF16),
        ({"stage": 1, "accumulation": 2, **NATIVE}, {}, BF16, FP32, FP32),
        ({"stage": 1, "accumulation": 2, "dtype": "float16"}, {}, FP16, FP32, FP32),
        ({"stage": 1, "accumulation": 2, "comm": "bf16"}, {}, BF16, BF16, BF16),
        ({"stage": 1, "accumulation": 2}, {"communication": BF16}, BF16, BF16, BF16),
        ({"stage": 1, "accumulation": 2}, {"communication": FP32}, FP32, FP32, FP32),
        ({"stage": 1, **IN_BF16}, {}, BF16, BF16, BF16),
        ({"stage": 2, **IN_BF16}, {}, BF16, FP32, BF16),
        ({"stage": 1, "dtype": "float16", **IN_BF16}, {}, FP16, FP32, FP32),
        ({"stage": 1, **IN_FP16}, {}, FP16, FP16, FP16),
        ({"stage": 0, "accumulation": 2}, {}, FP32, FP32, FP32),
        ({"stage": 0, "accumulation": 2, **NATIVE}, {}, BF16, FP32, FP32),
    ],
    ids=str,
)
def test_sums_of_micro_batches_are_sent_without_rounding(options, override, single, of_sums, in_step):
    """Unless the user set a communication dtype. The reduction's output has no lower dtype than its input."""
    policy = zeroamp.policy_from_config(config(**options))
    precision = Precision(is_low=True, compute="low", reason="", **override)
    dtypes, key = param_dtypes(nn.Parameter(torch.empty(1)), policy, precision)
    found = [group_dtypes(key, policy, SHARDS, sends_sums=sends_sums) for sends_sums in (False, True, None)]
    assert [each.communication for each in found] == [single, of_sums, in_step]
    assert all(torch.promote_types(each.reduce, each.communication) == each.reduce for each in found)
    assert dtypes.communication == in_step

"""Which dimension is sharded: the rule, and what it saves of the models that large runs train."""

import pytest
import torch
from torch import nn

from tests.processes.training import config, policy
from zeroamp.planning.shard_sizes import may_shard_any_dim, shard_dim


@pytest.mark.parametrize(
    ("shape", "num_shards", "dim"),
    [
        ((8, 6), 4, 0),  # no padding
        ((9, 8), 4, 1),
        ((9, 8), None, 0),
        ((9, 8), 1, 0),
        ((9, 6), 4, 0),  # 4 divides neither
        ((3, 8, 4), 4, 1),  # the first of two
        ((3, 5, 4), 4, 2),
        ((9,), 4, 0),
        ((99, 4), 4, 1),  # 1 of 99 rows: 1.01 % of padding
        ((199, 4), 4, 0),  # 1 of 199 rows: less than the copies are worth
        ((1, 16), 2, 1),
    ],
)
def test_the_rule(shape, num_shards, dim):
    assert shard_dim(shape, num_shards, any_dim=True) == dim
    assert shard_dim(shape, num_shards, any_dim=False) == 0


class _WithOwnAllGather(torch.Tensor):
    """As float8 weights are."""


def _quantized():
    parameter = nn.Parameter(torch.ones(9, 8))
    parameter.quant_state = "of bitsandbytes"
    return parameter


@pytest.mark.parametrize(
    "parameter",
    [
        nn.Parameter(torch.ones(9)),
        nn.Parameter(torch.ones(())),
        nn.Parameter(torch.ones(9, 0)),
        nn.Parameter(torch.ones(9, 8, dtype=torch.uint8), requires_grad=False),
        torch.ones(9, 8).as_subclass(_WithOwnAllGather),
        _quantized(),
    ],
    ids=["1-D", "0-D", "empty", "words", "subclass", "quantized"],
)
def test_parameters_that_are_sharded_over_dimension_0_only(parameter):
    assert not may_shard_any_dim(parameter, policy(config(3)))


def test_the_config_and_a_secondary_partition_keep_dimension_0():
    parameter = nn.Parameter(torch.ones(9, 8))
    assert may_shard_any_dim(parameter, policy(config(3)))
    assert may_shard_any_dim(nn.Parameter(parameter.detach().bfloat16(), requires_grad=False), policy(config(1)))
    assert not may_shard_any_dim(parameter, policy(config(3), {"shard_dim": 0}))
    assert not may_shard_any_dim(parameter, policy(config(3), {"hpz_partition_size": 2}))

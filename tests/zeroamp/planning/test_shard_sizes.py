"""Which dimension is sharded: the rule, and what it saves of the models that large runs train."""

import pytest
import torch
from torch import nn

import zeroamp
from tests.processes.training import config, policy
from zeroamp.planning.shard_sizes import local_numel, may_shard_any_dim, numel_of_shards, padded_numel, shard_dim


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


@pytest.mark.parametrize("shape", [(1,), (3,), (5, 3), (9, 8), (3, 8, 4), (2, 3, 5, 7)])
def test_the_padding_of_a_dimension_is_that_of_torch_s_chunks(shape):
    for dim in range(len(shape)):
        for num_shards in range(1, 9):
            largest = torch.empty(shape).chunk(num_shards, dim)[0]
            assert numel_of_shards(shape, dim, num_shards) == largest.numel() * num_shards


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


def _hf_plan(name, **fields):
    """Plan two layers of the width of a model that large runs train."""
    transformers = pytest.importorskip("transformers", reason="the models are transformers'")
    sizes = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 2, "num_attention_heads": 32}
    with torch.device("meta"):
        config_of_model = transformers.AutoConfig.for_model(name, **sizes, num_key_value_heads=8)
        model = transformers.AutoModelForCausalLM.from_config(config_of_model)
    return zeroamp.build_plan(model, policy(config(3, dtype=None, bf16={"enabled": True}), fields))


def _padding(plan, num_shards):
    """Return elements moved / elements."""
    return sum(padded_numel(p, num_shards) for p in plan.params) / sum(p.numel for p in plan.params)


def test_the_padding_of_layers_of_a_llama():
    planned, dim_0 = (_hf_plan("llama", shard_dim=key) for key in ("auto", 0))
    assert _padding(planned, 64) == _padding(dim_0, 64) == 1
    assert 1 <= _padding(planned, 4096) < 1.0001
    assert _padding(dim_0, 4096) > 1.05


def test_each_of_64_ranks_stores_a_64th_of_mixtral_s_experts():
    for key, part in (("auto", 1 / 64), (0, 1 / 8)):
        plan = _hf_plan("mixtral", shard_dim=key)
        experts = [param for param in plan.params if "experts" in param.fqn and len(param.shape) == 3]
        assert len(experts) == 4
        assert sum(local_numel(p, 64) for p in experts) == part * sum(p.numel for p in experts)

"""A secondary partition, live units and leaf modules: what is gathered when, and over which ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zeroamp
from benchmarks.peers.counting import Collectives
from tests.measuring.collectives import Gathers
from tests.processes.ranks import RankError
from tests.processes.training import SmallTraining, config, full_parameters, policy, same_bits, wrapped

NUM_STEPS = 2
BLOCK = 10_272 + 64  # elements of one of the three blocks: Linear layers and norms


def _gathers(fields):
    training = SmallTraining(config(3, threshold=0), fields=fields)
    with Gathers() as gathers, Collectives() as collectives:
        loss = training.loss()
        gathers.log.append("backward")
        training.train.backward(loss)
        training.train.step()
    counted = {key: calls for key, (calls, _) in zeroamp.traffic(training.model).by_dtype().items()}
    return gathers.log, dict(collectives.calls), dict(collectives.num_bytes), counted


def test_the_backward_gathers_over_the_secondary_partition(ranks4):
    log, calls, num_bytes, counted = ranks4.run(_gathers, {"hpz_partition_size": 2})[0]
    middle = log.index("backward")
    assert {size for _, size in log[:middle]} == {4}
    assert log[middle + 1 :]
    assert {size for _, size in log[middle + 1 :]} == {2}
    plain = ranks4.run(_gathers, {})[0]
    assert (calls, num_bytes) == plain[1:3], "as many collectives, of as many unsharded bytes"
    assert counted == calls


@pytest.mark.parametrize(
    ("size", "stage", "mesh_shape", "text"),
    [
        (3, 3, None, "(?=.*1, 2, 4)(?=.* is 3)"),
        (8, 3, None, "(?=.*1, 2, 4)(?=.* is 8)"),
        (4, 3, (2, 2), "(?=.*1, 2)(?=.* is 4)"),
        (2, 2, None, "(?=.* is 2)(?=.*stage 3)"),
    ],
)
def test_an_impossible_secondary_partition_is_refused(ranks4, size, stage, mesh_shape, text):
    with pytest.raises(RankError, match=f"ConfigError: zero_optimization.zero_hpz_partition_size{text}") as caught:
        ranks4.run(wrapped, "llama_tied", config(stage), fields={"hpz_partition_size": size}, mesh_shape=mesh_shape)
    assert str(caught.value).count("ConfigError: zero_opt") == 4, "on all ranks"


def _gathered(max_live):
    """Which parameters are whole after a forward, and after the backward of the first of two micro-batches."""
    training = SmallTraining(
        config(3, threshold=0, accumulation=2), name="llama_tied", fields={"max_live_parameters": max_live}
    )
    loss = training.loss()
    after_forward = _whole(training.model)
    training.train.backward(loss)
    return after_forward, _whole(training.model)


def _whole(model):
    return {fqn for fqn, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}


@pytest.mark.parametrize(("max_live", "num_live"), [(BLOCK - 1, 0), (BLOCK, 1), (3 * BLOCK - 1, 2), (10**9, 3)])
def test_the_last_units_that_fit_stay_gathered_until_their_backward(ranks2, max_live, num_live):
    after_forward, after_backward = ranks2.run(_gathered, max_live)[0]
    assert {fqn.split(".")[1] for fqn in after_forward if fqn.startswith("blocks")} == set("210"[:num_live])
    assert sum(fqn.startswith("blocks") for fqn in after_forward) == 7 * num_live, "typed groups too"
    assert after_backward == set()


class Experts(nn.Module):
    """A sparse layer: each rank runs one of the experts only."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        return x + self.experts[dist.get_rank()](x)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _train_sparse(stage):
    torch.manual_seed(0)
    fields = {"leaf_modules": {"name_suffixes": ["0", "1"]}}  # layers and experts: the outer ones count
    model = zeroamp.wrap_model(Sparse(), policy(config(stage), fields), auto_wrap_policy={"Linear"})
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for _ in range(NUM_STEPS):
        step.backward(model(torch.ones(2, 8)))
        norm = step.step().grad_norm
    return sorted(zeroamp.wrapping.state.wrap_state(model).plan.units), norm, full_parameters(model)


def test_ranks_may_run_different_parts_of_a_leaf_module(ranks2):
    # Were each expert a unit, as the policy says, the ranks would wait for each other in different gathers.
    stages = [ranks2.run(_train_sparse, stage)[0] for stage in (1, 3)]
    for units, norm, parameters in stages:
        assert units == ["layers.0", "layers.1"]
        assert norm == stages[0][1]
        assert same_bits(parameters, stages[0][2]) == []

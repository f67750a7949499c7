"""Parameters that are sharded over dimensions 1 and 2: everything planned is measured. `test_same_bits` trains them."""

import pytest
import torch

import zeroamp
from tests.measuring.measured import measured_step
from tests.models.small import build
from tests.processes.training import config, full_parameters, policy, same_bits, sharded_dims
from tests.selection import slow_but
from zeroamp.ledger.explain import Ledger
from zeroamp.planning.mesh import ranks_of
from zeroamp.wrapping.state import wrap_state

NAME = "odd_rows"
STATISTICS = 256
"""Bytes of the step's all-reduce that live past it, which are not predicted: see `tests/zeroamp/dry_run`."""


def _sharded_dims(model):
    """Return the dimensions that are sharded, after a comparison with the plan parameter by parameter."""
    state = wrap_state(model)
    found = sharded_dims(model)
    num_shards = ranks_of(state.mesh).shards(state.plan.policy)
    assert found == {param.fqn: param.shard_dim(num_shards) for param in state.plan.params}
    return set(found.values())


@pytest.mark.parametrize("stage", slow_but([1, 3], 3))
def test_planned_memory_is_that_measured(ranks2, stage):
    for rank, (found, predicted) in enumerate(ranks2.run(measured_step, "odd_bank", {"stage": stage, "threshold": 0})):
        for kind in ("parameters", "gradients", "traffic"):
            assert predicted[kind] == found[kind], kind
        if rank == 0:  # padded shards of other ranks have less optimizer state
            assert abs(found["peak"] - predicted["peak"]) <= STATISTICS


def _materialized():
    """Return the parameters of a model that was initialised on the meta device, for dimensions as planned and 0."""
    made = []
    for key in ("auto", 0):
        torch.manual_seed(5)
        with torch.device("meta"):
            model = OddLinears()
        model = zeroamp.wrap_model(model, policy(config(3), {"shard_dim": key}))
        assert _sharded_dims(model) == ({0, 1} if key else {0})
        made.append(full_parameters(model))
    return same_bits(*made)


class OddLinears(torch.nn.Sequential):
    """Two Linears whose rows 2 and 4 ranks do not divide."""

    def __init__(self):
        super().__init__(torch.nn.Linear(8, 9), torch.nn.Linear(9, 5), torch.nn.Linear(4, 7))


def test_a_meta_model_gets_the_same_values_in_every_dimension(ranks4):
    assert ranks4.run(_materialized) == [[]] * 4


def test_the_ledger_names_the_dimension_where_it_is_not_0():
    plan = zeroamp.build_plan(build(NAME), policy(config(3)))
    book = Ledger(plan=plan, num_shards=4)
    rows = {row["parameter"]: row["shard_dim"] for row in book.to_dict()["parameters"]}
    assert (rows["blocks.0.mixers"], rows["blocks.0.up.weight"], rows["blocks.0.down.weight"]) == (2, 1, 0)
    assert [row["shard_dims"] for row in book.to_dict()["groups"]] == [[1], [0, 1], [0, 1], [0, 1, 2]]
    text = " ".join(str(book).split())
    assert "Sharded over dimension 2, where dimension 0 would be padded: blocks.0.mixers, blocks.1.mixers." in text
    for other in (Ledger(plan=plan), Ledger(plan=plan, num_shards=1)):
        assert "dimension" not in str(other)

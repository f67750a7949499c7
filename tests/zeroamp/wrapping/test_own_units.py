"""Embeddings and heads as units of their own: when they are held, and errors by name. `test_same_bits` trains them."""

import re

import pytest
import torch
from torch.distributed.tensor import DTensor

import zeroamp
from tests.measuring.traffic import planned_and_counted
from tests.models.small import batch
from tests.processes.training import SmallTraining, config, wrapped
from zeroamp.hooks._torch.fsdp import groups_of
from zeroamp.hooks.collectives.collective_calls import peer_lost
from zeroamp.hooks.collectives.traffic import IssuedCollective
from zeroamp.wrapping.state import wrap_state

LARGE = 1000  # elements: embeddings and heads have 2,560


def _calls(name, accumulation, **options):
    """Return {group: [all-gathers, reductions]} of the groups of own units, of the plan and as counted in one step."""
    model = wrapped(name, config(3, threshold=LARGE, accumulation=accumulation, **options))
    plan, found = wrap_state(model).plan, []
    for traffic in planned_and_counted(model, batch(name, 0)):
        calls = {group.name: [0, 0] for group in plan.groups if group.unit in plan.own_units}
        for (collective, _, group), (number, _) in traffic.items():
            if group in calls:
                calls[group][collective != "all_gather"] += number
        found.append(calls)
    return found


TWO_GROUPS = [
    {"modules": "head.bias", "communication": "fp32"},
    {"modules": "embed.weight", "param": "bf16"},
    {"modules": "embed.bias", "param": "bf16", "communication": "fp32"},
]
"""The weight and the bias of an own unit are all-gathered in two collectives: their dtypes of the reduction differ."""


@pytest.mark.parametrize(
    ("name", "overrides", "num_groups"),
    [
        ("checkpointed_chunks", [], 2),
        ("scaled", [], 2),
        ("biased", TWO_GROUPS, 4),
    ],
    ids=["computed again in chunks", "kept for the backward", "four groups"],
)
def test_each_group_is_gathered_and_reduced_once_per_micro_batch(ranks2, name, overrides, num_groups):
    planned, counted = ranks2.run(_calls, name, 2, zeroamp={"overrides": overrides})[0]
    assert planned == counted
    assert list(counted.values()) == [[2, 2]] * num_groups


@pytest.mark.parametrize(("name", "num_gathers"), [("checkpointed_lookup", 1), ("checkpointed_scaled_lookup", 2)])
def test_a_lookup_that_is_computed_again_costs_one_more_gather(ranks2, name, num_gathers):
    assert ranks2.run(_calls, name, 1)[0][1] == {"embed": [num_gathers, 1], "head": [1, 1]}


def _states():
    """Return which own units are sharded: at each block's forward and backward, and after the backward."""
    model = wrapped("two_blocks_untied", config(3, threshold=LARGE))
    found = []

    def note(*_args):
        found.append(
            {fqn: isinstance(model.get_submodule(fqn)._parameters["weight"], DTensor) for fqn in ("embed", "head")}
        )

    for index, module in enumerate((model.blocks[0], model.norm)):
        module.register_forward_pre_hook(note)
        if index == 0:
            module.register_full_backward_hook(note)
    loss = model(batch("two_blocks_untied", 0))
    note()
    loss.backward()
    note()
    return found


def test_when_an_embedding_and_a_head_are_sharded(ranks2):
    """An embedding is sharded after its lookup and a head until its forward and after its backward."""
    both, only_embed = {"embed": True, "head": True}, {"embed": True, "head": False}
    assert ranks2.run(_states)[0] == [both, both, only_embed, both, both]


def _shared_buffers():
    state = wrap_state(wrapped("two_blocks_untied", config(3, threshold=LARGE)))
    units = {unit: groups_of(module._get_fsdp_state()) for unit, module in state.units.items()}
    return {unit: own[0]._reduce_scatter_comm.shares_buffers for unit, own in units.items() if own}


def test_the_large_receive_buffers_are_not_shared(ranks2):
    shared = ranks2.run(_shared_buffers)[0]
    assert {unit for unit, is_shared in shared.items() if not is_shared} == {"embed", "head"}
    assert shared["blocks.0"]


def _regularise():
    """Add a term to the loss outside of the forward; return the error's text."""
    training = SmallTraining(config(3, threshold=LARGE), name="two_blocks_untied")
    loss = training.loss() + 0.01 * training.model.embed.weight.pow(2).sum()
    with pytest.raises(zeroamp.StepError) as error:
        training.train.backward(loss)
    return str(error.value)


def test_a_weight_read_after_the_forward_is_an_error(ranks2):
    """A loss of a weight that was read after the forward is an error by name."""
    text = ranks2.run(_regularise)[0]
    assert "is a DTensor: it was computed from a sharded parameter" in text
    assert '{"own_units": false}' in text


def _error_of_a_lost_peer(group):
    model = SmallTraining(config(3, threshold=LARGE), name="two_blocks_untied").model
    issued = IssuedCollective("reduce_scatter", torch.empty(4), group, None)
    return str(peer_lost(RuntimeError("gloo/ timed out"), issued, wrap_state(model).listeners))


def test_a_lost_peer_names_the_cause_of_own_units(ranks2):
    """The error of a lost peer names the cause that only own units have."""
    cause = "The output of head must be in the loss of every rank that calls it"
    assert cause in ranks2.run(_error_of_a_lost_peer, "head")[0]
    assert "must be in the loss" not in ranks2.run(_error_of_a_lost_peer, "blocks.0")[0]


def _read(name):
    """Return the error of a forward and backward that read a weight outside of its module, and its notes."""
    model = wrapped(name, config(3, threshold=LARGE))
    with pytest.raises((RuntimeError, zeroamp.WrapError)) as error:
        model(batch(name, 0)).backward()
    return "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("reads_in_forward", "head"),
        ("functional_tie", "embed"),
        ("gathered_weight", "head"),
    ],
)
def test_a_weight_read_outside_of_its_module_is_an_error(ranks2, name, module):
    """A weight that is read outside of its module is an error by name."""
    text = ranks2.run(_read, name)[0]
    assert re.search(rf"{module}\.weight was read outside of its module", text)
    assert '{"own_units": false}' in text


def _rows_before_the_backward():
    model = wrapped("two_blocks_untied", config(3, threshold=LARGE), fields={"hpz_partition_size": 2})
    model(batch("two_blocks_untied", 0))
    return [len(module.weight.to_local()) for module in (model.embed, model.blocks[0].out)]


def test_an_embedding_has_no_secondary_partition(ranks4):
    """An embedding is not resharded over a secondary partition of which no backward gathers it."""
    assert ranks4.run(_rows_before_the_backward) == [[80 // 4, 32 // 2]] * 4

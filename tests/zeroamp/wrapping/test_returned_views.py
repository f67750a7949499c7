"""A caller may change in place what a unit returned, also if it is a view, as in one process."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zeroamp
from tests.models import side_channels
from tests.models.side_channels import build, noise
from tests.oracles import two_ranks
from tests.processes.training import full_parameters, same_bits
from tests.selection import slow_but

NUM_STEPS = 2
STAGES = (0, 2, 3)
MODES = {
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "bf16": {"bf16": {"enabled": True}},
}


def loss_of(model, index):
    return model(noise(index).to(next(model.parameters()).dtype))


def _train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=two_ranks.LEARNING_RATE)
    losses = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of each view that a unit returns
        for step in range(NUM_STEPS):
            loss = loss_of(model, step * two_ranks.NUM_RANKS + dist.get_rank())
            losses.append(float(loss.detach()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses, full_parameters(model)


def _all_stages(name, mode):
    found = {}
    for stage in STAGES:
        config = {**MODES[mode], "zero_optimization": {"stage": stage}}
        found[stage] = _train(zeroamp.wrap_model(build(getattr(side_channels, name)), config))
    return found


NAMES = ("ViewTensors", "ViewTuples", "ViewDicts", "ViewsOfKept")
CASES = [(name, mode) for name in NAMES for mode in MODES]
FAST = (("ViewTensors", "autocast"), ("ViewDicts", "bf16"), ("ViewsOfKept", "autocast"))


@pytest.mark.parametrize("case", slow_but(CASES, *FAST), ids="-".join)
def test_returned_views_may_change_in_place(ranks2, case):
    name, mode = case
    losses, parameters = two_ranks.train(build(getattr(side_channels, name)), loss_of, NUM_STEPS, mode=mode)
    for rank, by_stage in enumerate(ranks2.run(_all_stages, name, mode)):
        for stage, (own_losses, own_parameters) in by_stage.items():
            assert own_losses == losses[rank], stage
            assert same_bits(own_parameters, parameters) == [], stage


def _of_inputs():
    model = zeroamp.wrap_model(build(side_channels.ViewsOfInputs), {"zero_optimization": {"stage": 3}})
    try:
        _train(model)
    except RuntimeError as error:
        return str(error)


def test_torch_refuses_to_change_a_view_of_a_units_input(ranks2):
    """FSDP2's alias of the input is the output of a custom autograd function."""
    for text in ranks2.run(_of_inputs):
        assert "is being modified inplace" in text


def _of_fsdp2():
    model = build(side_channels.ViewTensors)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    try:
        _train(model)
    except RuntimeError as error:
        return str(error)


def test_fsdp2_alone_raises_for_a_changed_view(ranks2):
    for text in ranks2.run(_of_fsdp2):
        assert "setStorage" in text

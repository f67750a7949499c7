"""A caller may change in place what a unit returned, also if it is a view, as in one process."""

import warnings

import pytest

import zeroamp
from tests.models import side_channels
from tests.models.side_channels import build, noise
from tests.oracles import two_ranks
from tests.processes.training import on_fsdp2_alone, plain_loop, same_bits
from tests.selection import slow_but

NUM_STEPS = 2
STAGES = (0, 3)
MODES = {
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "bf16": {"bf16": {"enabled": True}},
}


def loss_of(model, index):
    return model(noise(index).to(next(model.parameters()).dtype))


def _train(model):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of each view that a unit returns
        return plain_loop(model, loss_of, NUM_STEPS)


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


def _error_of(model):
    with pytest.raises(RuntimeError) as raised:
        _train(model)
    return str(raised.value)


def _of_inputs():
    return _error_of(zeroamp.wrap_model(build(side_channels.ViewsOfInputs), {"zero_optimization": {"stage": 3}}))


def test_torch_refuses_to_change_a_view_of_a_units_input(ranks2):
    """FSDP2's alias of the input is the output of a custom autograd function."""
    for text in ranks2.run(_of_inputs):
        assert "is being modified inplace" in text


def _of_fsdp2():
    return _error_of(on_fsdp2_alone(build(side_channels.ViewTensors)))


def test_fsdp2_alone_raises_for_a_changed_view(ranks2):
    for text in ranks2.run(_of_fsdp2):
        assert "setStorage" in text

"""What code changes on a wrapped model: an error in place of FSDP2's silence, as docs/from-fsdp2.md has it."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.utils import parametrize

import zeroamp
from tests.processes.launch import ROOT
from tests.processes.training import config

ONES = torch.ones(2, 8)


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def _of_fsdp2():
    model = _Net()
    for each in (*model.blocks, model):
        fully_shard(each)
    return model


def _of_zeroamp():
    return zeroamp.wrap_model(_Net(), zeroamp.policy_from_config(config(3, dtype=None)))


def _train(model, call=None):
    """Run two steps with other inputs on each rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        (call or model)(ONES * (dist.get_rank() + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _add_module(model):
    torch.manual_seed(1)
    model.blocks.append(nn.Linear(8, 8))
    _train(model)
    weights = [torch.empty(8, 8) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, model.blocks[-1].weight.detach())
    return not torch.equal(*weights)


def _replace_module(model):
    torch.manual_seed(1)
    model.head = nn.Linear(8, 4)
    _train(model)
    weights = [torch.empty(4, 8) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, model.head.weight.detach())
    return not torch.equal(*weights)


@torch.no_grad()
def _set_data(model):
    before = model(ONES)
    model.reshard()
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    return torch.equal(model(ONES), before)


@torch.no_grad()
def _call_with_others(model):
    """Call the whole model with other tensors. In a first forward FSDP2 would take them for the parameters."""
    others = {fqn: parameter.detach() * 2 for fqn, parameter in model.named_parameters()}
    functional_call(model, others, (ONES,))


ADDED_OR_REPLACED = "a module is added or replaced after sharding"
SILENT = {
    "added": (ADDED_OR_REPLACED, _add_module, r"StepError: SGD.*holds blocks.2.weight, which is not sharded"),
    "replaced": (ADDED_OR_REPLACED, _replace_module, r"StepError: .*holds head.weight.*added or replaced"),
    "data set": (
        "`parameter.data = tensor`, as in code for SAM or EMA",
        _set_data,
        r"WrapError: \w+\.[\w.]+\.data was set .*parameter.copy_",
    ),
}
"""Name -> row of the table; what a user does, which returns whether the result is wrong; and zeroamp's error."""


def _tried(make, change):
    try:
        return change(make())
    except zeroamp.ZeroAmpError as error:
        return f"{type(error).__name__}: {error}"


def _silent_and_refused(name):
    _, change, _ = SILENT[name]
    return _tried(_of_fsdp2, change), _tried(_of_zeroamp, change)


@pytest.mark.parametrize("name", SILENT)
def test_what_fsdp2_gets_wrong_silently_is_an_error(ranks2, name):
    row, _, text = SILENT[name]
    for is_wrong, error in ranks2.run(_silent_and_refused, name):
        assert is_wrong is True
        assert re.search(text, error), error
    assert f"| {row} |" in (ROOT / "docs" / "from-fsdp2.md").read_text()


def _replace_weight(model):
    model.head.weight = nn.Parameter(torch.ones(4, 8))
    _train(model)


def _parametrize(model):
    parametrize.register_parametrization(model.blocks[0][0], "weight", nn.Identity())
    _train(model)


def _after_a_forward(change):
    def changed(model):
        _train(model)
        return change(model)

    return changed


def _errors(change):
    return [_tried(_of_zeroamp, each) for each in (change, _after_a_forward(change))]


@pytest.mark.parametrize(
    ("change", "fqn"),
    [(_replace_weight, "head.weight"), (_parametrize, "blocks.0.0.weight"), (_call_with_others, r"[\w.]+\.weight")],
    ids=["new", "parametrized", "functional_call"],
)
def test_a_replaced_parameter_is_named_before_and_after_forwards(ranks2, change, fqn):
    for error in ranks2.run(_errors, change)[0]:
        assert re.match(rf"WrapError: The FSDP unit of {fqn} .*parametrized or pruned after wrap_model", error), error


def _allowed():
    """What replaces sharded parameters rightly: whole models that move, and checkpoints that are assigned."""
    model = _of_zeroamp()
    doubled = {fqn: tensor * 2 for fqn, tensor in model.state_dict().items()}
    model.load_state_dict(doubled, assign=True)
    with torch.no_grad():
        before = model(ONES)
        model.to("cpu").requires_grad_(True)
        for parameter in model.parameters():
            parameter.data.mul_(1)
        after = model(ONES)
        plain = _Net()
        for parameter in plain.parameters():
            parameter.mul_(2)
        is_right = torch.equal(before, plain(ONES)) and torch.equal(after, before)
    _train(model)
    return is_right and all(isinstance(each, DTensor) for each in model.parameters())


def test_moved_and_assigned_parameters_are_not_refused(ranks2):
    assert ranks2.run(_allowed) == [True, True]


class _Complex(nn.Module):
    """A frozen table of 16-byte elements beside a trained layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(8, dtype=torch.complex128), requires_grad=False)
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs):
        return self.linear(inputs * self.table.real.float())


def _outputs_of_complex():
    model = zeroamp.wrap_model(_Complex(), zeroamp.policy_from_config(config(3, dtype=None)))
    return torch.equal(model(ONES), _Complex()(ONES))


def test_a_frozen_complex128_parameter_is_sharded(ranks2):
    assert ranks2.run(_outputs_of_complex) == [True, True]

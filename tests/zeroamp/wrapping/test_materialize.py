"""`wrap_model(materialize=False)`: the caller gives a sharded meta-device model its values."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.processes.training import config, full_parameters, same_bits

NAME = "llama_untied"


def _trained(by_caller, stage):
    policy = zeroamp.policy_from_config(config(stage))
    if by_caller:
        with torch.device("meta"):
            model = build(NAME)
        model = zeroamp.wrap_model(model, policy, materialize=False)
        assert all(parameter.is_meta and isinstance(parameter, DTensor) for parameter in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with pytest.raises(zeroamp.StepError, match=r"embed.weight is on the meta device.*to_empty"):
            zeroamp.TrainStep(model, optimizer)
        model.to_empty(device="cpu")
        values = dict(build(NAME).named_parameters())
        for fqn, parameter in model.named_parameters():
            zeroamp.set_full_parameter(parameter, values[fqn].detach())
    else:
        model = zeroamp.wrap_model(build(NAME), policy, materialize=False)  # holds values: no effect
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for index in range(2):
        train.backward(loss_of(model, batch(NAME, 2 * index + dist.get_rank())))
        train.step()
    return full_parameters(model)


@pytest.mark.parametrize("stage", [0, 3])
def test_values_that_the_caller_gives_are_trained(ranks2, stage):
    assert same_bits(ranks2.run(_trained, True, stage)[0], ranks2.run(_trained, False, stage)[0]) == []


def _without_values():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3)), materialize=False)
    with pytest.raises(RuntimeError, match="meta"):
        model(torch.ones(2, 4))
    return True


def test_a_forward_without_values_raises(ranks2):
    assert ranks2.run(_without_values) == [True, True]

"""`wrap_model(materialize=False)`: the caller gives a sharded meta-device model its values."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.processes.ranks import RankError
from tests.processes.training import config, full_parameters, same_bits
from tests.selection import slow_but

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


@pytest.mark.parametrize("stage", slow_but([0, 3], 3))
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


class InParts(nn.Module):
    """Owns a parameter and a buffer; `how` they are initialised differs."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.empty(6, 4))
        self.register_buffer("count", torch.empty(3, dtype=torch.int64))

    def reset_parameters(self):
        self.count.fill_(7)
        if self.how == "whole":
            nn.init.kaiming_uniform_(self.weight)
        elif self.how == "view":
            self.weight.data.view(-1, 2)[:] = torch.randn(12, 2)
        elif self.how == "orthogonal":
            nn.init.orthogonal_(self.weight)
        elif self.how == "thirds":
            for part in self.weight.chunk(3):
                nn.init.normal_(part)
        elif self.how == "out":
            torch.eye(6, 4, out=self.weight)
        elif self.how == "two of three":
            for part in self.weight.chunk(3)[:2]:
                nn.init.normal_(part)
        elif self.how == "scaled":
            self.weight.mul_(2)
        elif self.how == "copied":
            self.weight.copy_(self.weight * 2)
        elif self.how == "replaced by a part":
            self.weight.data = self.weight.data.clone()

    def forward(self, x):
        return x @ self.weight


def _initialised(how):
    with torch.device("meta"):
        model = nn.Sequential(InParts(how))
    torch.manual_seed(3)
    model = zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3, dtype=None)))
    torch.manual_seed(3)
    plain = InParts(how)
    plain.weight.requires_grad_(False)
    plain.reset_parameters()
    same = torch.equal(model[0].weight.full_tensor(), plain.weight)
    return same and model[0].count.tolist() == [7] * 3


@pytest.mark.parametrize("how", ["whole", "view", "orthogonal", "thirds", "out"])
def test_an_initialiser_gives_the_values_of_the_plain_module(ranks2, how):
    assert ranks2.run(_initialised, how) == [True] * 2


@pytest.mark.parametrize("how", ["two of three", "scaled", "copied", "replaced by a part", "nothing"])
def test_a_tensor_of_which_no_or_not_every_element_is_set_is_refused(ranks2, how):
    with pytest.raises(RankError, match=r"0\.weight is on the meta device.*InParts does not initialise it"):
        ranks2.run(_initialised, how)

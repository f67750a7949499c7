"""`wrap_model(materialize=False)`: the caller gives a sharded meta-device model its values."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.oracles import one_process
from tests.processes.ranks import RankError
from tests.processes.training import config, full_parameters, same_bits

NAME = "llama_untied"


def _given_by_the_caller():
    with torch.device("meta"):
        model = build(NAME)
    model = zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3)), materialize=False)
    assert all(parameter.is_meta and isinstance(parameter, DTensor) for parameter in model.parameters())
    with pytest.raises(zeroamp.StepError, match=r"embed.weight is on the meta device.*to_empty"):
        zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    model.to_empty(device="cpu")
    values = dict(build(NAME).named_parameters())
    for fqn, parameter in model.named_parameters():
        zeroamp.set_full_parameter(parameter, values[fqn].detach())
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
    for index in range(2):
        step.backward(loss_of(model, batch(NAME, 2 * index + dist.get_rank())))
        step.step()
    return full_parameters(model)


def test_values_that_the_caller_gives_are_trained(ranks2):
    _, _, expected = one_process.train(NAME, world_size=2, num_steps=2)
    assert same_bits(ranks2.run(_given_by_the_caller)[0], expected) == []


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


@pytest.mark.parametrize("how", ["whole", "view", "thirds", "out"])
def test_an_initialiser_gives_the_values_of_the_plain_module(ranks2, how):
    assert ranks2.run(_initialised, how) == [True] * 2


@pytest.mark.parametrize("how", ["two of three", "scaled", "replaced by a part", "nothing"])
def test_a_tensor_that_is_not_wholly_set_is_refused(ranks2, how):
    """A tensor of which no or not every element is set is refused."""
    with pytest.raises(RankError, match=r"0\.weight is on the meta device.*InParts does not initialise it"):
        ranks2.run(_initialised, how)

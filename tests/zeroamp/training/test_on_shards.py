"""`TrainStep(on_shards=True)`: optimizers that the caller calls element-wise; and optimizers that are refused."""

from functools import partial

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.processes.optimizers import CASES, NAME
from tests.processes.training import SmallTraining, check_errors, config, errors_of, same_bits

EIGHT_BITS = "`bitsandbytes.optim.AdamW8bit`"


class Plain(torch.optim.Optimizer):
    """As kernels of other libraries need it: plain tensors with elements. Assigns data, and replaces its state."""

    def __init__(self, parameters, lr=1e-2):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        self.state["all"]["count"] = self.state["all"].get("count", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                assert type(parameter) is torch.nn.Parameter
                assert parameter.numel() > 0
                state = self.state[parameter]
                momentum = state.get("momentum", torch.zeros_like(parameter))
                state["momentum"] = momentum * 0.5 + parameter.grad
                state["is_used"] = torch.ones_like(parameter, dtype=torch.bool)
                state["step"] = state.get("step", 0) + 1
                parameter.data = parameter - group["lr"] * state["momentum"]


def _plain(stage):
    training = SmallTraining(config(stage), Plain, name=NAME, on_shards=True)
    for index in range(3):
        training.step(index)
    optimizer = training.optimizer
    assert optimizer.state.pop("all") == {"count": 3}
    parameters = dict(training.model.named_parameters())
    assert optimizer.state.keys() == set(parameters.values())
    for parameter, state in optimizer.state.items():
        for key in ("momentum", "is_used"):
            assert isinstance(state[key], DTensor)
            assert state[key].placements == parameter.placements
            assert state[key].shape == parameter.shape
        assert state["step"] == 3
    momentum = {fqn: optimizer.state[parameter]["momentum"].full_tensor() for fqn, parameter in parameters.items()}
    return training.parameters(), momentum


def test_shards_have_elements_also_with_fewer_rows_than_ranks_and_state_is_sharded_like_the_parameters(ranks4):
    (ours, momentum), (theirs, whole) = ranks4.run(_plain, 3)[0], ranks4.run(_plain, 0)[0]
    assert same_bits(ours, theirs) == []
    assert same_bits(momentum, whole) == []


def _two(parameters):
    return [torch.optim.AdamW(parameters[:1]), torch.optim.AdamW(parameters[1:])]


def _muon(parameters):
    return torch.optim.Muon([parameter for parameter in parameters if parameter.dim() == 2])


class OwnAdafactor(torch.optim.Adafactor):
    pass


REFUSED = {
    "not a bool": (_two, {"on_shards": 1}, r"on_shards=\) must be True, False.* each of the 2"),
    "too few": (_two, {"on_shards": [True]}, r"on_shards=\) must be True, False.* each of the 2"),
    "Muon": (_muon, {"on_shards": True}, r"Muon with on_shards=True.*Leave on_shards out"),
    "SparseAdam": (torch.optim.SparseAdam, {}, "SparseAdam, which takes sparse gradients.*AdamW"),
    "Adafactor": (torch.optim.Adafactor, {"on_shards": True}, "Adafactor, which needs.*one of 2.*AdamW8bit.*stage"),
    "a subclass": (OwnAdafactor, {}, "OwnAdafactor, which needs statistics of whole parameters"),
}


def _refusals():
    return errors_of(
        {
            name: partial(SmallTraining, config(3), make, name=NAME, **options)
            for name, (make, options, _) in REFUSED.items()
        }
    )


def test_what_would_be_wrong_is_refused_by_name(ranks2):
    check_errors(ranks2.run(_refusals), {name: text for name, (*_, text) in REFUSED.items()})


def _bitsandbytes():
    def eight_bits(parameters):
        return CASES[EIGHT_BITS].make({str(index): parameter for index, parameter in enumerate(parameters)})

    return errors_of({"": lambda: SmallTraining(config(3), eight_bits, name=NAME)})


def test_bitsandbytes_without_the_statement_is_refused_by_name(ranks2):
    pytest.importorskip("bitsandbytes", reason="the optimizer is bitsandbytes'")
    check_errors(ranks2.run(_bitsandbytes), {"": "bitsandbytes's AdamW8bit.*on_shards=True"})

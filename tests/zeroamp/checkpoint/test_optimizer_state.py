"""Optimizer states of every form go on bit for bit, or are refused by name when they are saved or loaded."""

import functools
import re

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.lr_scheduler import ExponentialLR, LinearLR

import zeroamp
from tests.models.small import OddRows
from tests.processes.checkpoint_training import Case, Training, error_of, refused, resume
from tests.selection import slow_but


class Momentum(torch.optim.Optimizer):
    """SGD whose momentum is in another form."""

    def __init__(self, parameters, make=torch.zeros_like):
        super().__init__(parameters, {"lr": 1e-2, "growth_rate": float("inf")})  # an option of Prodigy
        self.make = make

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"], state["count"] = self.make(parameter), 0
                state["count"] += 1
                momentum, gradient = state["momentum"], parameter.grad
                if not isinstance(momentum, DTensor):
                    parameter, gradient = parameter.to_local(), gradient.to_local()
                momentum.mul_(0.9).add_(gradient)
                parameter.sub_(group["lr"] * momentum)


class LocalMomentum(Momentum):
    """Plain tensors of this rank's own rows, as optimizers with kernels of their own keep them."""

    def __init__(self, parameters):
        super().__init__(parameters, lambda p: torch.zeros_like(p.to_local(), dtype=torch.float64))


class Forwarding(torch.optim.Optimizer):
    """A wrapper, as accelerate has one: everything is the inner optimizer's."""

    def __init__(self, parameters):
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        self.defaults = self.optimizer.defaults

    state = property(lambda self: self.optimizer.state, lambda self, value: setattr(self.optimizer, "state", value))
    param_groups = property(
        lambda self: self.optimizer.param_groups, lambda self, value: setattr(self.optimizer, "param_groups", value)
    )

    def step(self):
        self.optimizer.step()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)


def _named(parameters, step=1):
    return torch.optim.AdamW([(f"parameter {index}", p) for index, p in enumerate(parameters)][::step], lr=1e-2)


STATES = {
    "local": Case(optimizer=LocalMomentum),
    "local at stage 0": Case(stage=0, optimizer=LocalMomentum),
    "bf16": Case(optimizer=functools.partial(Momentum, make=functools.partial(torch.zeros_like, dtype=torch.bfloat16))),
    "forwarding": Case(optimizer=Forwarding),
    "two groups": Case(optimizer="two groups", async_=True),
    "fused": Case(optimizer="fused", async_=True),
    "some only": Case(optimizer="some only", async_=True),
}


@pytest.mark.parametrize("name", slow_but(STATES, "local", "bf16", "forwarding"))
def test_states_of_every_form_go_on(ranks2, tmp_path, name):
    for resumed in ranks2.run(resume, str(tmp_path), STATES[name]):
        assert resumed.differing == []


def _reordered(folder):
    """The same groups with their parameters in another order; names that the optimizer has of them stay with them."""
    saved = Training(Case(optimizer=_named)).run(0, 2)
    saved.save(folder)
    state = saved.state()[0]
    loaded = Training(Case(optimizer=functools.partial(_named, step=-1)), seed=7)
    loaded.load(folder)
    ours = loaded.state()[0]
    names = [training.optimizer.param_groups[0]["param_names"] for training in (saved, loaded)]
    return [name for name in state if not torch.equal(ours[name], state[name])], names[0] == names[1][::-1]


def test_parameters_in_another_order_get_their_own_state(ranks2, tmp_path):
    assert ranks2.run(_reordered, str(tmp_path)) == [([], True)] * 2


def _column(optimizer, parameter):
    optimizer.state[parameter]["column"] = torch.zeros_like(parameter).sum(0, keepdim=True)


def _replicated(optimizer, parameter):
    optimizer.state[parameter]["all"] = torch.zeros_like(parameter).redistribute(placements=[Replicate()])


def _global(optimizer, parameter):
    optimizer.state["global"]["count"] = 1


def _inner(optimizer, parameter):
    optimizer.parts = [torch.optim.SGD([parameter], lr=1e-2, momentum=0.9)]
    parameter.grad = torch.zeros_like(parameter)
    optimizer.parts[0].step()


WHERE = "The optimizer's state '{}' of embed.weight .*{}"
REFUSED = {
    _column: WHERE.format("column", r"shape \[13, 6\] \(Shard\(dim=1\),\).*shape \[1, 6\] \(Shard"),
    _replicated: WHERE.format("all", r"shape \[13, 6\] \(Replicate"),
    _global: "The optimizer holds global, which is not in .*`extra`",
    _inner: r"AdamW holds an inner SGD, .*TrainStep\(model, \[",
}


def _refused(folder):
    found = []
    for add in REFUSED:
        training = Training(Case())
        add(training.optimizer, training.model.embed.weight)
        found.append(error_of(training.save, folder))
    return found


def test_states_that_could_not_be_loaded_are_refused_when_saved(ranks2, tmp_path):
    for found in ranks2.run(_refused, str(tmp_path / "none")):
        for words, error in zip(REFUSED.values(), found, strict=True):
            assert re.match("CheckpointError: ", error)
            assert re.search(words, error)
    assert not (tmp_path / "none").exists()


def _of_other_shards(folder, saved, loaded):
    Training(saved).run(0, 1).save(folder)
    training = Training(loaded, seed=7)
    return refused(training, training.load, folder)


@pytest.mark.parametrize(
    ("saved", "loaded", "words"),
    [
        (
            Case(optimizer=LocalMomentum),
            Case(optimizer=LocalMomentum, group_size=1),
            r"was sharded .*2 ranks, but is not sharded here",
        ),
        (
            Case(optimizer=LocalMomentum, build=OddRows),
            Case(optimizer=LocalMomentum, build=OddRows, options={"zeroamp": {"shard_dim": 0}}),
            r"was sharded .*Shard\(dim=1\).*2 ranks, but is sharded .*Shard\(dim=0\).*shard_dim",
        ),
    ],
    ids=["another number of ranks", "another dimension"],
)
def test_state_that_is_each_rank_s_own_is_refused_by_other_shards(ranks2, tmp_path, saved, loaded, words):
    for error, changed in ranks2.run(_of_other_shards, str(tmp_path), saved, loaded):
        assert re.search(rf"CheckpointError: .*cannot be resharded.*{words}", error)
        assert changed == []


def _several(kinds, schedule):
    """A training step of several optimizers, the first of them with a schedule."""
    model = Training(Case()).model
    parameters = list(model.parameters())
    optimizers = [kind(parameters[index :: len(kinds)], lr=1e-2) for index, kind in enumerate(kinds)]
    schedulers = [None if schedule is None else schedule(optimizers[0]), *[None] * (len(kinds) - 1)]
    return zeroamp.TrainStep(model, optimizers, schedulers)


TWO = (torch.optim.SGD, torch.optim.AdamW)
OTHERS = {
    "one": (TWO[:1], None, "2 optimizers, but .*has 1"),
    "order": (TWO[::-1], LinearLR, "state of torch.optim.SGD, but optimizer 0 .*is torch.optim.AdamW"),
    "scheduler": (TWO, functools.partial(ExponentialLR, gamma=0.5), "LinearLR, but optimizer 0 .*ExponentialLR"),
    "no scheduler": (TWO, None, "LinearLR, but optimizer 0 .*no scheduler"),
}


def _misfits(folder):
    train = _several(TWO, LinearLR)
    zeroamp.save_checkpoint(folder, train.model, train)
    for kinds, schedule, words in OTHERS.values():
        other = _several(kinds, schedule)
        with pytest.raises(zeroamp.CheckpointError, match=words):
            zeroamp.load_checkpoint(folder, other.model, other)


def test_other_optimizers_are_refused_by_name(ranks2, tmp_path):
    ranks2.run(_misfits, str(tmp_path))

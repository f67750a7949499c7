"""Optimizer states of every form go on bit for bit, or are refused by name when they are saved."""

import functools
import re

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from tests.processes.checkpoint_training import Case, Training, differences, error_of


class Momentum(torch.optim.Optimizer):
    """SGD whose momentum is in another form."""

    def __init__(self, parameters, make=torch.zeros_like):
        super().__init__(parameters, {"lr": 1e-2})
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
        super().__init__(parameters, lambda p: torch.zeros_like(p.to_local()))


class LowMomentum(Momentum):
    def __init__(self, parameters):
        super().__init__(parameters, lambda p: torch.zeros_like(p, dtype=torch.bfloat16))


class DoubleLocalMomentum(Momentum):
    def __init__(self, parameters):
        super().__init__(parameters, lambda p: torch.zeros_like(p.to_local(), dtype=torch.float64))


class Signs(torch.optim.SGD):
    """SGD that also keeps the sign of every gradient as an integer, and a flag."""

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                entries = {"sign": parameter.grad.sign().to(torch.int8), "is_used": torch.tensor(True)}
                self.state[parameter].update(entries)
        super().step()


def _named(parameters, step=1):
    return torch.optim.AdamW([(f"parameter {index}", p) for index, p in enumerate(parameters)][::step], lr=1e-2)


FORMS = {
    "local": LocalMomentum,
    "bf16": LowMomentum,
    "local fp64": DoubleLocalMomentum,
    "integers": lambda p: Signs(p, lr=1e-2, momentum=0.9),
    "an empty group": lambda p: torch.optim.AdamW([{"params": p}, {"params": [], "lr": 0.5}]),
    "named": _named,
}


def _go_on(folder):
    found = {}
    for name, make in FORMS.items():
        case = Case(optimizer=make)
        saved = Training(case).run(0, 2)
        saved.optimizer.param_groups[-1]["lr"] *= 2
        saved.save(f"{folder}/{name}")
        log = saved.run(2, 4).log[2:]
        state = saved.state()
        loaded = Training(case, seed=7).run(0, 1)
        loaded.log.clear()
        loaded.load(f"{folder}/{name}")
        found[name] = differences(loaded.run(2, 4).state(), state) + ["the log"] * (loaded.log != log)
    return found


def test_states_of_every_form_go_on(ranks2, tmp_path):
    for found in ranks2.run(_go_on, str(tmp_path)):
        assert found == {name: [] for name in FORMS}


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


def _with(key, make):
    """Return what gives the first parameter's state an entry."""

    def add(optimizer, parameter):
        optimizer.state[parameter][key] = make(parameter)

    return add


def _global(optimizer, parameter):
    optimizer.state["global"]["count"] = 1


WHERE = "The optimizer's state '{}' of embed.weight .*{}"
REFUSED = {
    "columns": (
        _with("column", lambda p: torch.zeros_like(p).sum(0, keepdim=True)),
        WHERE.format("column", r"shape \[13, 6\] \(Shard\(dim=1\),\).*shape \[1, 6\] \(Shard"),
    ),
    "replicated": (
        _with("all", lambda p: torch.zeros_like(p).redistribute(placements=[Replicate()])),
        WHERE.format("all", r"shape \[13, 6\] \(Replicate"),
    ),
    "global": (_global, "The optimizer holds global, which is not in .*`extra`"),
}


def _refuse(folder):
    found = {}
    for name, (add, _) in REFUSED.items():
        training = Training(Case())
        add(training.optimizer, training.model.embed.weight)
        found[name] = error_of(training.save, folder)
    return found


def test_states_that_could_not_be_loaded_are_refused_when_saved(ranks2, tmp_path):
    for found in ranks2.run(_refuse, str(tmp_path / "none")):
        for name, (_, words) in REFUSED.items():
            assert found[name].startswith("CheckpointError: "), name
            assert re.search(words, found[name]), name
    assert not (tmp_path / "none").exists()


def _local_state_of_more_ranks(folder):
    Training(Case(optimizer=LocalMomentum)).run(0, 1).save(folder)
    training = Training(Case(optimizer=LocalMomentum, group_size=1), seed=7)
    before = training.state()
    error = error_of(training.load, folder)
    return error, [text for text in differences(training.state(), before) if not text.startswith("random")]


def test_state_that_is_each_rank_s_own_is_refused_by_another_number_of_ranks(ranks2, tmp_path):
    for error, changed in ranks2.run(_local_state_of_more_ranks, str(tmp_path)):
        assert re.search(r"cannot be resharded.*was sharded .*2 ranks, but is not sharded here", error)
        assert changed == []


@pytest.mark.parametrize("stage", [0, 2])
def test_local_state_goes_on_at_other_stages(ranks2, tmp_path, stage):
    for found in ranks2.run(_go_on_at, str(tmp_path), stage):
        assert found == []


def _go_on_at(folder, stage):
    case = Case(stage=stage, optimizer=LocalMomentum)
    saved = Training(case).run(0, 1)
    saved.save(folder)
    saved.run(1, 2)
    state = saved.state()
    loaded = Training(case, seed=7)
    loaded.load(folder)
    return differences(loaded.run(1, 2).state(), state)

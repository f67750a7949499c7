"""Checkpoints hold all optimizers and schedulers of a `TrainStep`; optimizers that hide state are refused by name."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ExponentialLR, LinearLR

import zeroamp
from tests.processes.checkpoint_training import VOCAB, Case, Training, differences, error_of, full


class Several(Training):
    """A `Training` whose parameters are in two optimizers, the first of them with a scheduler."""

    def __init__(self, case, seed=0, order=1, schedulers=("linear", None)):
        super().__init__(case, seed)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizers = [
            torch.optim.SGD(parameters[:4], lr=1e-1, momentum=0.9),
            torch.optim.AdamW(parameters[4:], lr=1e-2),
        ][::order]
        make = {
            "linear": lambda o: LinearLR(o, 0.5, 1.0, 5),
            "exponential": lambda o: ExponentialLR(o, 0.5),
            None: lambda o: None,
        }
        self.schedulers = [make[name](o) for name, o in zip(schedulers, self.optimizers, strict=True)]
        self.train = zeroamp.TrainStep(self.model, self.optimizers, self.schedulers)

    def _step(self, index):
        generator = torch.Generator().manual_seed(index * dist.get_world_size() + dist.get_rank())
        self.train.backward(self.model(torch.randint(0, VOCAB, (2, 5), generator=generator)))
        report = self.train.step()
        self.log.append((report.loss, report.grad_norm, report.lr))

    def state(self):
        tensors, values = super().state()
        names = {id(p): name for name, p in self.model.named_parameters()}
        for optimizer in self.optimizers:
            for parameter, entries in optimizer.state.items():
                tensors |= {f"{names[id(parameter)]}.{k}": full(v) for k, v in entries.items() if v is not None}
        values["schedulers"] = [None if s is None else s.state_dict() for s in self.schedulers]
        return tensors, values


def _go_on(folder, stage, async_):
    case = Case(stage=stage)
    saved = Several(case).run(0, 3)
    saved.save(folder, async_=async_)
    log = saved.run(3, 6).log[3:]
    zeroamp.wait_for_save(saved.model)
    after = saved.state()
    loaded = Several(case, seed=7).run(0, 1)
    loaded.log.clear()
    loaded.load(folder)
    found = differences(loaded.run(3, 6).state(), after)
    return found + ["the log"] * (loaded.log != log), sorted(name for name in after[0] if "." in name)


@pytest.mark.parametrize(
    ("stage", "async_"),
    [pytest.param(0, False, marks=pytest.mark.slow), pytest.param(2, True, marks=pytest.mark.slow), (3, False)],
)
def test_training_with_several_optimizers_goes_on_bit_for_bit(ranks2, tmp_path, stage, async_):
    for found, names in ranks2.run(_go_on, str(tmp_path), stage, async_):
        assert found == []
        assert "embed.weight.momentum_buffer" in names
        assert "blocks.1.up.weight.exp_avg_sq" in names


def _misfits(folder):
    Several(Case()).run(0, 1).save(folder)
    Training(Case()).run(0, 1).save(f"{folder}/one")
    others = {
        "one": Training(Case()),
        "order": Several(Case(), order=-1),
        "scheduler": Several(Case(), schedulers=("exponential", None)),
        "none": Several(Case(), schedulers=(None, None)),
    }
    found = {name: error_of(other.load, folder) for name, other in others.items()}
    return {**found, "two": error_of(Several(Case()).load, f"{folder}/one")}


def test_other_optimizers_are_refused_by_name(ranks2, tmp_path):
    for found in ranks2.run(_misfits, str(tmp_path)):
        assert re.search("2 optimizers, but .*has 1", found["one"])
        assert re.search("1 optimizer, but .*has 2", found["two"])
        assert re.search("state of SGD, but optimizer 0 .*is AdamW", found["order"])
        assert re.search("LinearLR, but optimizer 0 .*ExponentialLR", found["scheduler"])
        assert re.search("LinearLR, but optimizer 0 .*no scheduler", found["none"])


class Composite(torch.optim.Optimizer):
    """SGD for some parameters and AdamW for the rest, inside one class that has no state of its own."""

    def __init__(self, parameters):
        parameters = list(parameters)
        super().__init__(parameters, {"lr": 1e-2})
        self.parts = [
            torch.optim.SGD(parameters[::2], lr=1e-2, momentum=0.9),
            torch.optim.AdamW(parameters[1::2], lr=1e-2),
        ]

    def step(self):
        for part in self.parts:
            part.step()


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


def _composites(folder):
    hidden = error_of(Training(Case(optimizer=Composite)).run(0, 1).save, f"{folder}/hidden")
    saved = Training(Case(optimizer=Forwarding)).run(0, 2)
    saved.save(f"{folder}/forwarding")
    after = saved.run(2, 4).state()
    loaded = Training(Case(optimizer=Forwarding), seed=7)
    loaded.load(f"{folder}/forwarding")
    return hidden, differences(loaded.run(2, 4).state(), after)


def test_an_optimizer_that_loses_the_state_of_inner_ones_is_refused(ranks2, tmp_path):
    for hidden, forwarding in ranks2.run(_composites, str(tmp_path)):
        assert re.match(r"CheckpointError: .*Composite holds an inner SGD, .*TrainStep\(model, \[", hidden)
        assert forwarding == []
    assert not (tmp_path / "hidden").exists()

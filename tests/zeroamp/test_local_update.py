"""The update of plain shards: the bits of the same optimizer on DTensors, and whose optimizers are shown shards."""

import sys
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import zeroamp
from tests.models import batch, build, loss_of
from tests.training import config, full_parameters, same_bits, wrapped
from zeroamp.local_update import works_on_shards

NAME = "llama_tied"

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "AdamW of other kernels": (torch.optim.AdamW, {"foreach": True, "amsgrad": True, "maximize": True}),
    "AdamW in one kernel": (torch.optim.AdamW, {"fused": True}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"weight_decay": 0.1}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}


def _hook(optimizer, args, kwargs):
    """A hook on the step: the optimizer then works on DTensors."""
    assert all(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"])


def _train(kind, stage, mesh_shape, on_shards, restarts):
    model = wrapped(NAME, config(stage, accumulation=2), mesh_shape=mesh_shape)
    first, *others = model.parameters()
    first.requires_grad_(False)  # held by the optimizer, and never with a gradient
    others[1].requires_grad_(False)
    factory, arguments = OPTIMIZERS[kind]
    groups = [{"params": [first, *others[:3]], "lr": 1e-3}, {"params": others[3:]}]
    optimizer = factory(groups, lr=1e-2, **arguments)
    if not on_shards:
        optimizer.register_step_pre_hook(_hook)
    assert works_on_shards(optimizer) == on_shards
    step = zeroamp.TrainStep(model, optimizer)
    for index in range(6):
        step.backward(loss_of(model, batch(NAME, 2 * index + torch.distributed.get_rank())))
        step.step()
        if index == 3 and restarts:
            optimizer.load_state_dict(optimizer.state_dict())
    assert works_on_shards(optimizer) == on_shards
    assert [group["params"] for group in optimizer.param_groups] == [[first, *others[:3]], others[3:]]
    return full_parameters(model), _described(model, optimizer)


def _described(model, optimizer):
    """{parameter's name: {name in the state: (class, placements, shape, value in full)}}"""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: {name: _value(value) for name, value in state.items()}
        for parameter, state in optimizer.state.items()
    }


def _value(value):
    if isinstance(value, DTensor):
        return "DTensor", value.placements, value.shape, value.full_tensor()
    return (type(value), (), value.shape, value) if isinstance(value, torch.Tensor) else (type(value), (), (), value)


def _flat(described):
    return {(name, key): value for name, state in described.items() for key, value in state.items()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parameters_and_state_are_those_of_the_optimizer_on_dtensors(ranks2, kind):
    for stage, restarts in ((3, False), (1, True)):
        (ours, mine), (theirs, plain) = (
            ranks2.run(_train, kind, stage, None, on_shards, restarts)[0] for on_shards in (True, False)
        )
        assert same_bits(ours, theirs) == []
        mine, plain = _flat(mine), _flat(plain)
        assert {key: value[:3] for key, value in mine.items()} == {key: value[:3] for key, value in plain.items()}
        assert all(mine[key][3] is None or torch.equal(mine[key][3], plain[key][3]) for key in plain)
        assert (len(mine) > 0) == (kind != "SGD")


def test_replicas_keep_the_same_bits(ranks4):
    found = [ranks4.run(_train, "AdamW", 3, (2, 2), how, False) for how in (True, False)]
    assert same_bits(found[0][0][0], found[1][0][0]) == []
    assert {value[1] for value in _flat(found[0][0][1]).values()} == {
        value[1] for value in _flat(found[1][0][1]).values()
    }


def _types_seen_by_the_update():
    seen = set()
    adam = sys.modules["torch.optim.adam"]
    update = adam.adam

    def watched(*lists, **options):
        seen.update(type(tensor).__name__ for tensors in lists for tensor in tensors)
        return update(*lists, **options)

    model = wrapped(NAME, config(3))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # which puts a step of its own into the optimizer
    step = zeroamp.TrainStep(model, optimizer)
    with mock.patch.object(adam, "adam", watched):
        for index in range(2):
            step.backward(loss_of(model, batch(NAME, index)))
            step.step()
    return seen, {type(parameter).__name__ for parameter in optimizer.param_groups[0]["params"]}


def test_the_update_sees_plain_tensors_and_the_optimizer_holds_its_own(ranks2):
    assert ranks2.run(_types_seen_by_the_update)[0] == ({"Tensor"}, {"DTensor"})


def _after_an_update_that_raised():
    model = wrapped(NAME, config(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = zeroamp.TrainStep(model, optimizer)
    step.backward(loss_of(model, batch(NAME, 0)))
    step.step()
    before = optimizer.param_groups[0]["params"], optimizer.state, dict(optimizer.state)
    step.backward(loss_of(model, batch(NAME, 1)))
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(TypeError):
        step.step()
    after = optimizer.param_groups[0]["params"], optimizer.state, dict(optimizer.state)
    return [one is other for one, other in zip(before[:2], after[:2], strict=True)], before[2].keys() == after[2].keys()


def test_an_update_that_raises_leaves_the_optimizer_its_own(ranks2):
    assert ranks2.run(_after_an_update_that_raised)[0] == ([True, True], True)


class Own(torch.optim.AdamW):
    pass


def _parameters():
    return build(NAME).parameters()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Own(_parameters()),
        lambda: torch.optim.Adagrad(_parameters()),
        lambda: torch.optim.AdamW(_parameters(), differentiable=True),
        lambda: _with(torch.optim.AdamW(_parameters()), "step", lambda: None),
    ],
    ids=["subclass", "other optimizer", "differentiable", "step of its own"],
)
def test_others_are_called_as_they_are(make):
    assert not works_on_shards(make())


def _with(optimizer, name, value):
    setattr(optimizer, name, value)
    return optimizer


def test_hooks_on_steps_see_the_optimizer_as_it_is():
    optimizer = torch.optim.AdamW(_parameters())
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
    ):
        handle = register(_hook)
        assert not works_on_shards(optimizer)
        handle.remove()
        assert works_on_shards(optimizer)


def _with_state_of_another_placement():
    model = wrapped(NAME, config(3))
    parameter = next(model.parameters())
    optimizer = torch.optim.AdamW([parameter])
    found = []
    for value in (parameter.full_tensor(), parameter.redistribute(placements=[torch.distributed.tensor.Replicate()])):
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": value.detach()}
        found.append(works_on_shards(optimizer))
    optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(parameter)}
    return [*found, works_on_shards(optimizer)]


def test_state_that_is_sharded_otherwise_is_left_to_torch(ranks2):
    assert ranks2.run(_with_state_of_another_placement)[0] == [False, False, True]

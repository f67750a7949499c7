"""Between two steps a caller may change parameters, param groups and state: the update on shards uses what is there."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import zeroamp
from tests.models.small import batch, loss_of
from tests.processes.training import config, full_parameters, same_bits, wrapped
from tests.selection import slow_but
from zeroamp.training.step import driver_of
from zeroamp.training.update import works_on_shards

NAME = "llama_tied"


def _unfreeze(_, model, __):
    next(model.parameters()).requires_grad_(True)


def _freeze(_, model, __):
    list(model.parameters())[2].requires_grad_(False)


def _load_optimizer(train, *_):
    state = copy.deepcopy(train.optimizers[0].state_dict())
    train.optimizers[0].load_state_dict(state)


def _load_checkpoint(train, model, folder):
    path = zeroamp.save_checkpoint(folder / "saved", model, train)
    for parameter in model.parameters():
        parameter.detach().to_local().add_(1.0)
    zeroamp.load_checkpoint(path, model, train)


def _load_model(_, model, __):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


def _assign(_, model, __):
    """Replace the memory of some parameters, as a way of loading may do."""
    for parameter in list(model.parameters())[:2]:
        parameter.data = DTensor.from_local(
            parameter.detach().to_local().clone(), parameter.device_mesh, parameter.placements, run_check=False
        )


def _add_group(train, model, __):
    held = {id(p) for group in train.optimizers[0].param_groups for p in group["params"]}
    others = [parameter for parameter in model.parameters() if id(parameter) not in held]
    train.optimizers[0].add_param_group({"params": others, "lr": 1e-3})


def _replace_a_value(train, *_):
    state = train.optimizers[0].state
    for values in list(state.values())[:2]:
        values["exp_avg"] = torch.zeros_like(values["exp_avg"])


def _replace_a_list(train, *_):
    group = train.optimizers[0].param_groups[0]
    group["params"] = list(reversed(group["params"]))


def _forget_a_state(train, *_):
    train.optimizers[0].state.pop(next(iter(train.optimizers[0].state)))


CHANGES = {
    "unfreezing": _unfreeze,
    "freezing": _freeze,
    "loading the optimizer": _load_optimizer,
    "loading a checkpoint": _load_checkpoint,
    "loading the model": _load_model,
    "assigning parameters": _assign,
    "a new param group": _add_group,
    "another value in the state": _replace_a_value,
    "another order": _replace_a_list,
    "a state that was removed": _forget_a_state,
}
"""Name -> the change after step 3."""


def _train(kind, folder, on_shards):
    model = wrapped(NAME, config(3, clip=1.0))
    first, *others = model.parameters()
    first.requires_grad_(kind != "unfreezing")
    held = others[1:] if kind == "a new param group" else others
    optimizer = torch.optim.AdamW([first, *held], lr=1e-2, weight_decay=0.1)
    if not on_shards:
        optimizer.register_step_pre_hook(lambda *_: None)  # the optimizer then works on DTensors
    train = zeroamp.TrainStep(model, optimizer)
    used = []
    for index in range(7):
        train.backward(loss_of(model, batch(NAME, 2 * index + dist.get_rank())))
        used.append(works_on_shards(optimizer))
        train.step()
        if index == 3:
            CHANGES[kind](train, model, folder)
    assert used == [on_shards] * 7
    return full_parameters(model)


def _both(kind, folder):
    return _train(kind, folder / "one", True), _train(kind, folder / "other", False)


@pytest.mark.parametrize("kind", slow_but(CHANGES, "unfreezing", "loading a checkpoint"))
def test_a_change_has_the_bits_of_the_optimizer_on_dtensors(ranks2, kind, tmp_path):
    for on_shards, on_dtensors in ranks2.run(_both, kind, tmp_path):
        assert same_bits(on_shards, on_dtensors) == []


def _memory_after_loading(on_shards):
    model = wrapped(NAME, config(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train = zeroamp.TrainStep(model, optimizer, on_shards=on_shards)
    train.backward(loss_of(model, batch(NAME, 0)))
    train.step()
    train.backward(loss_of(model, batch(NAME, 1)))
    train.step()
    saved = copy.deepcopy(optimizer.state_dict())
    with torch.no_grad():  # the tensors themselves, not views
        old = [weakref.ref(value.to_local()) for value in _tensors(optimizer) if isinstance(value, DTensor)]
    optimizer.load_state_dict(saved)
    gc.collect()
    return len(old), sum(each() is not None for each in old)


def _tensors(optimizer):
    return [value for values in optimizer.state.values() for value in values.values()]


@pytest.mark.parametrize("on_shards", [False, True])
def test_loading_an_optimizer_releases_the_state_that_it_replaces(ranks2, on_shards):
    for num_tensors, num_alive in ranks2.run(_memory_after_loading, on_shards):
        assert num_tensors > 0
        assert num_alive == 0


def _optimizer_outlives():
    model = wrapped(NAME, config(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        train = zeroamp.TrainStep(model, optimizer)
        train.backward(loss_of(model, batch(NAME, 0)))
        train.step()
    update = weakref.ref(driver_of(train).updates[0])
    del train
    gc.collect()
    return update() is None


def test_an_optimizer_keeps_nothing_of_a_train_step(ranks2):
    assert ranks2.run(_optimizer_outlives) == [True] * 2


def _replaced_elsewhere(what):
    """Return how many tensors are replaced between two steps, and how many of the old ones stay alive."""
    model = wrapped(NAME, config(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    train = zeroamp.TrainStep(model, optimizer)
    for index in range(3):
        train.backward(loss_of(model, batch(NAME, index)))
        train.step()
    if what == "parameters":
        old = [parameter._local_tensor.untyped_storage()._weak_ref() for parameter in model.parameters()]
        model._apply(lambda tensor: tensor.clone())  # as `model.to` does
    else:
        values = [values for values in optimizer.state.values() if values]
        old = [each["exp_avg"].to_local().untyped_storage()._weak_ref() for each in values]
        for each in values:
            each["exp_avg"] = each["exp_avg"].clone()
    gc.collect()
    num_alive = sum(not torch.UntypedStorage._expired(each) for each in old)
    train.backward(loss_of(model, batch(NAME, 3)))
    train.step()
    return len(old), num_alive


@pytest.mark.parametrize("what", ["parameters", "state"])
def test_memory_that_the_caller_replaces_between_steps_is_released_at_once(ranks2, what):
    for num_old, num_alive in ranks2.run(_replaced_elsewhere, what):
        assert num_old > 0
        assert num_alive == 0

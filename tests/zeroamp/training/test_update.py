"""The update of plain shards: the bits of the same optimizer on DTensors, and whose optimizers are shown shards."""

import copy
import functools
import gc
import sys
import types
import weakref
from contextlib import suppress
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.lr_scheduler import ConstantLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.processes.training import SmallTraining, config, full_parameters, same_bits, wrapped
from tests.selection import slow_but
from zeroamp.checkpoint import load as load_module
from zeroamp.training.step import step_of
from zeroamp.training.update import OptimizerUpdate, works_on_shards

NAME = "two_blocks"

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "AdamW in one kernel": (torch.optim.AdamW, {"fused": True}),
    "SGD": (torch.optim.SGD, {"weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {}),
}


def _hook(optimizer, args, kwargs):
    """A hook on the step: the optimizer then works on DTensors."""
    assert all(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"])


def _load_optimizer(train, *_):
    train.optimizers[0].load_state_dict(copy.deepcopy(train.optimizers[0].state_dict()))


def _load_checkpoint(train, model, folder):
    path = zeroamp.save_checkpoint(folder / "saved", model, train)
    for parameter in model.parameters():
        parameter.detach().to_local().add_(1.0)
    zeroamp.load_checkpoint(path, model, train)


CHANGES = {"loading the optimizer": _load_optimizer, "loading a checkpoint": _load_checkpoint}
"""Name -> the change after the third optimizer step."""


def _train(on_shards, folder, *, name=NAME, kind="AdamW", stage=3, mesh_shape=None, change=None):
    model = wrapped(name, config(stage, accumulation=2), mesh_shape=mesh_shape)
    first, *others = model.parameters()
    first.requires_grad_(False)  # held by the optimizer, and never with a gradient
    others[1].requires_grad_(False)  # until the third step
    factory, arguments = OPTIMIZERS[kind]
    groups = [{"params": [first, *others[:3]], "lr": 1e-3}, {"params": others[3:]}]
    optimizer = factory(groups, lr=1e-2, **arguments)
    if not on_shards:
        optimizer.register_step_pre_hook(_hook)
    train = zeroamp.TrainStep(model, optimizer)
    seen = []
    for index in range(8):
        train.backward(loss_of(model, batch(name, 2 * index + torch.distributed.get_rank())))
        ready = works_on_shards(optimizer)
        if train.step() is not None:
            seen.append(ready)
        if index == 3:
            others[1].requires_grad_(True)
        if index == 5 and change is not None:
            CHANGES[change](train, model, folder)
    assert seen == [on_shards] * 4
    assert [parameter for group in optimizer.param_groups for parameter in group["params"]] == [first, *others]
    return full_parameters(model), _described(model, optimizer)


def _described(model, optimizer):
    """{(parameter's name, name in the state): what it is}, and the same with its values in full."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    values = {
        (names[parameter], name): value for parameter, state in optimizer.state.items() for name, value in state.items()
    }
    kinds = {key: _kind(value) for key, value in values.items()}
    full = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in values.items()}
    return kinds, full


def _kind(value):
    placements = value.placements if isinstance(value, DTensor) else ()
    return type(value).__name__, placements, value.shape, value.stride(), value.dtype, value.requires_grad


# AdamW is the optimizer where a case names none.
CASES = {
    **{kind: {"kind": kind} for kind in OPTIMIZERS if kind != "AdamW"},
    **{change: {"change": change} for change in CHANGES},
    "stage 1": {"stage": 1, "change": "loading the optimizer"},
    "on replicas": {"mesh_shape": (2, 2)},
    "with fewer rows than ranks": {"name": "conv", "mesh_shape": (1, 4)},
}


@pytest.mark.parametrize("name", slow_but(CASES, "loading a checkpoint", "stage 1"))
def test_parameters_and_state_are_those_of_the_optimizer_on_dtensors(request, tmp_path, name):
    ranks = request.getfixturevalue("ranks4" if "mesh_shape" in CASES[name] else "ranks2")
    (ours, state), (theirs, on_dtensors) = (
        ranks.run(_train, on_shards, tmp_path / str(on_shards), **CASES[name])[0] for on_shards in (True, False)
    )
    assert same_bits(ours, theirs) == []
    assert state[0] == on_dtensors[0]
    assert same_bits(state[1], on_dtensors[1]) == []
    assert (len(state[0]) > 0) == (name != "SGD")


def _types_seen_by_the_update():
    seen = set()
    adam = sys.modules["torch.optim.adam"]
    update = adam.adam

    def watched(*lists, **options):
        seen.update(type(tensor).__name__ for tensors in lists for tensor in tensors)
        return update(*lists, **options)

    # A scheduler puts a step of its own into the optimizer.
    training = SmallTraining(config(3), torch.optim.AdamW, functools.partial(ConstantLR, factor=1.0))
    parameters = training.optimizer.param_groups[0]["params"]
    with mock.patch.object(adam, "adam", watched):
        for index in range(2):
            seen.clear()
            training.backward(index)
            version = parameters[0]._version
            training.train.step()
    return parameters[0]._version > version, seen, {type(parameter).__name__ for parameter in parameters}


def test_the_update_sees_plain_tensors_and_the_optimizer_holds_its_own(ranks2):
    assert ranks2.run(_types_seen_by_the_update)[0] == (True, {"Tensor"}, {"DTensor"})


class Own(torch.optim.AdamW):
    pass


def _parameters():
    return build(NAME).parameters()


def _scheduled(optimizer):
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return optimizer


def _wrapping(optimizer):
    inner = optimizer.step
    optimizer.step = functools.wraps(inner)(lambda: inner())  # noqa: PLW0108 (it has attributes of its own)
    return optimizer


def _of_its_own(optimizer):
    optimizer.step = types.MethodType(lambda self: None, optimizer)
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda: Own(_parameters()),
        lambda: torch.optim.Muon([p for p in _parameters() if p.dim() == 2]),
        lambda: torch.optim.AdamW(_parameters(), differentiable=True),
        lambda: _of_its_own(torch.optim.AdamW(_parameters())),
        lambda: _scheduled(_of_its_own(torch.optim.AdamW(_parameters()))),
        lambda: _wrapping(_scheduled(torch.optim.AdamW(_parameters()))),
    ],
    ids=["subclass", "other optimizer", "differentiable", "own step", "own step, scheduled", "scheduled, wrapped"],
)
def test_others_are_called_as_they_are(make):
    assert not works_on_shards(make())


def test_hooks_on_steps_see_the_optimizer_as_it_is():
    optimizer = torch.optim.AdamW(_parameters())
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        handle = register(_hook)
        assert not works_on_shards(optimizer)
        handle.remove()
        assert works_on_shards(optimizer)


def test_step_hooks_are_seen_without_registering_one_in_each_step():
    optimizer, registered = torch.optim.AdamW(_parameters()), []
    removable = torch.utils.hooks.RemovableHandle.__init__

    def init(self, *args, **kwargs):
        registered.append(1)
        removable(self, *args, **kwargs)

    assert works_on_shards(optimizer)
    with mock.patch.object(torch.utils.hooks.RemovableHandle, "__init__", init):
        assert all(works_on_shards(optimizer) for _ in range(3))
    assert registered == []
    optimizer.register_step_post_hook(_hook)
    assert not works_on_shards(optimizer)
    # Dicts of hooks that others replace are found again: an optimizer without them gets new ones.
    for name in [
        name for name, value in vars(optimizer).items() if isinstance(value, dict) and _hook in value.values()
    ]:
        delattr(optimizer, name)
    optimizer.__setstate__({})
    assert works_on_shards(optimizer)
    optimizer.register_step_post_hook(_hook)
    assert not works_on_shards(optimizer)
    assert works_on_shards(torch.optim.AdamW(_parameters()))


def _not_steppable(how, folder):
    """Return (whether its optimizer gets shards, whether another model's does, whether the model is freed)."""
    training, other = SmallTraining(config(3)), SmallTraining(config(3))
    training.step()
    other.step()
    if how == "asleep":
        zeroamp.sleep(training.model, training.optimizer)
    elif how == "read":
        read = zeroamp.iter_weights(training.model)
        next(read)
    else:
        path = zeroamp.save_checkpoint(folder, training.model, training.train)
        with (
            mock.patch.object(load_module, "read_tensors", mock.Mock(side_effect=InterruptedError)),
            suppress(zeroamp.CheckpointError),
        ):
            zeroamp.load_checkpoint(path, training.model, training.train)
    model = weakref.ref(training.model)
    shards = works_on_shards(training.optimizer), works_on_shards(other.optimizer)
    read = training = None
    gc.collect()
    other.step()
    return (*shards, model() is None)


@pytest.mark.parametrize("how", ["asleep", "read", "half loaded"])
def test_a_model_that_must_not_step_leaves_other_models_alone(ranks2, tmp_path, how):
    assert ranks2.run(_not_steppable, how, tmp_path) == [(False, True, True)] * 2


def _with_other_values():
    """For each of some values in the place of the gradient and in that of the state: whether shards are shown."""
    parameter = next(wrapped(NAME, config(3)).parameters())
    optimizer = torch.optim.AdamW([parameter])
    like = torch.zeros_like(parameter)
    replicated = parameter.detach().redistribute(placements=[Replicate()])
    found = []
    for gradient, state in (
        (like, like),
        (like, replicated),
        (like, parameter.detach().full_tensor()),
        (replicated, like),
    ):
        parameter.grad = gradient
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": state}
        found.append(works_on_shards(optimizer))
    parameter.grad_dtype = None
    parameter.grad, optimizer.state[parameter]["exp_avg"] = like.bfloat16(), like
    return [*found, works_on_shards(optimizer)]


def test_what_is_sharded_or_rounded_otherwise_is_left_to_torch(ranks2):
    assert ranks2.run(_with_other_values)[0] == [True, False, False, False, False]


def test_state_of_somebody_else_is_left_alone():
    parameter, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    optimizer.state["all"], optimizer.state[other] = 3, {"exp_avg": 4}
    optimizer.state[parameter]["ema"] = torch.zeros(2)  # beside what the optimizer makes
    for _ in range(2):
        parameter.grad = torch.ones(2)
        OptimizerUpdate(optimizer, None).step()
    assert (optimizer.state["all"], optimizer.state[other]) == (3, {"exp_avg": 4})
    assert sorted(optimizer.state[parameter]) == ["ema", "momentum_buffer"]


def _load_state(training):
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def _replace_parameters(training):
    training.model._apply(lambda tensor: tensor.clone())  # as `model.to` does


def _replace_state(training):
    for values in training.optimizer.state.values():
        values["exp_avg"] = values["exp_avg"].clone()


def _memory_replaced(replace, on_shards):
    """Return how many tensors are replaced between two steps, and how many of the old ones stay alive."""
    training = SmallTraining(config(3), functools.partial(torch.optim.AdamW, lr=1e-2, fused=True), on_shards=on_shards)
    for index in range(3):
        training.step(index)
    if replace is _replace_parameters:
        tensors = list(training.model.parameters())
    else:
        tensors = [values["exp_avg"] for values in training.optimizer.state.values()]
    old = [tensor._local_tensor.untyped_storage()._weak_ref() for tensor in tensors]
    del tensors
    replace(training)
    gc.collect()
    num_alive = sum(not torch.UntypedStorage._expired(each) for each in old)
    training.step(3)
    return len(old), num_alive


@pytest.mark.parametrize(
    ("replace", "on_shards"),
    [(_load_state, False), (_load_state, True), (_replace_parameters, False), (_replace_state, False)],
)
def test_memory_that_the_caller_replaces_between_steps_is_released_at_once(ranks2, replace, on_shards):
    for num_old, num_alive in ranks2.run(_memory_replaced, replace, on_shards):
        assert num_old > 0
        assert num_alive == 0


def _optimizer_outlives():
    training = SmallTraining(config(3))
    for _ in range(2):
        train = zeroamp.TrainStep(training.model, training.optimizer)
        train.backward(training.loss())
        train.step()
    update = weakref.ref(step_of(train).updates[0])
    del train
    gc.collect()
    return update() is None


def test_an_optimizer_keeps_nothing_of_a_train_step(ranks2):
    assert ranks2.run(_optimizer_outlives) == [True] * 2

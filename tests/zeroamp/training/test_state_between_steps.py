"""Between two steps a caller may replace parameters and state: the memory of the old ones is released at once."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch

import zeroamp
from tests.processes.training import SmallTraining, config
from zeroamp.training.step import driver_of

NAME = "llama_tied"


def _load_state(training):
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def _replace_parameters(training):
    training.model._apply(lambda tensor: tensor.clone())  # as `model.to` does


def _replace_state(training):
    for values in training.optimizer.state.values():
        values["exp_avg"] = values["exp_avg"].clone()


def _memory_replaced(replace, on_shards):
    """Return how many tensors are replaced between two steps, and how many of the old ones stay alive."""
    training = SmallTraining(config(3), partial(torch.optim.AdamW, lr=1e-2, fused=True), on_shards=on_shards)
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
    update = weakref.ref(driver_of(train)._updates[0])
    del train
    gc.collect()
    return update() is None


def test_an_optimizer_keeps_nothing_of_a_train_step(ranks2):
    assert ranks2.run(_optimizer_outlives) == [True] * 2

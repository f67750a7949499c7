"""A load is whole, or whatever reads or trains the model says to load again. After a failed step, a load goes on."""

import gc
from functools import partial
from pathlib import Path
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.processes.checkpoint_training import VOCAB, Case, Training, differences, error_of
from zeroamp.checkpoint import load as load_module

AGAIN = "zeroamp.load_checkpoint"


def _uses(training, folder):
    """What reads, trains or writes a model."""
    loss = partial(training.model, torch.arange(VOCAB)[None])
    return {
        "forward": loss,
        "backward": lambda: training.train.backward(torch.ones((), requires_grad=True)),
        "step": training.train.step,
        "zero_grad": training.train.zero_grad,
        "optimizer.step": training.optimizer.step,
        "save": lambda: training.save(folder),
        "export": lambda: zeroamp.export_hf(training.model, folder / "hf"),
        "load_hf": lambda: zeroamp.load_hf(training.model, folder / "hf"),
        "iter_weights": lambda: next(iter(zeroamp.iter_weights(training.model))),
        "sleep": lambda: zeroamp.sleep(training.model),
        "state_dict": training.model.state_dict,
        "explain": lambda: zeroamp.explain(training.model),
    }


def _half_loaded(folder, error_type):
    training = Training(Case(scheduler="cosine")).run(0, 2)
    path = training.save(folder / "run")
    undisturbed = training.run(2, 3).state()
    resumed = Training(Case(scheduler="cosine"), seed=7).run(0, 1)
    real = load_module.read_tensors

    def fail(*args):
        real(*args)
        if dist.get_rank() == 1:
            raise error_type("interrupted")

    with mock.patch.object(load_module, "read_tensors", fail):
        try:
            resumed.load(path)
        except BaseException as error:
            first = f"{type(error).__name__}: {error}"
    errors = {name: error_of(use) for name, use in _uses(resumed, folder).items()}
    missing = error_of(resumed.load, folder / "none")
    alone = error_of(zeroamp.load_checkpoint, path, resumed.model)
    without = error_of(resumed.load, path, load_optimizer_states=False)
    still = error_of(resumed.train.step)
    dist.barrier()
    published = sorted(each.name for each in (folder / "run").iterdir())
    resumed.load(path)
    hooks = [len(module._forward_pre_hooks) for module in resumed.model.modules()]
    fresh = [len(module._forward_pre_hooks) for module in training.model.modules()]
    found = differences(resumed.run(2, 3).state(), undisturbed)
    return first, errors, (missing, alone, without, still), published, hooks == fresh, found


@pytest.mark.parametrize("error_type", [OSError, KeyboardInterrupt])
def test_a_load_that_failed_midway_is_refused_everywhere_until_it_succeeds(ranks2, tmp_path, error_type):
    results = ranks2.run(_half_loaded, tmp_path, error_type)
    for rank, (first, errors, others, published, is_clean, found) in enumerate(results):
        is_own = error_type is KeyboardInterrupt and rank == 1
        assert first.startswith("KeyboardInterrupt" if is_own else "CheckpointError: rank 1: "), first
        for name, error in errors.items():
            assert error is not None, name
            assert AGAIN in error, (name, error)
        missing, alone, without, still = others
        assert "checkpoint" in missing
        assert AGAIN in still
        for error in (alone, without):
            assert "Call load_checkpoint with the same arguments as then" in error
        assert (published, is_clean, found) == (["latest", "step_00000002"], True, [])


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise OSError("in the backward")


class _Unusable(zeroamp.Callback):
    def before_update(self):
        raise OSError("before the update")


def _fails_in_a_forward(training):
    handle = training.model.blocks[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(OSError("forward")))
    try:
        training.run(2, 3)
    finally:
        handle.remove()


def _fails_in_a_backward(training):
    handle = training.model.blocks[0].register_forward_hook(lambda module, args, output: _Raises.apply(output))
    try:
        training.run(2, 3)
    finally:
        handle.remove()


def _fails_in_an_update(training):
    callback = _Unusable()
    training.train.callbacks.append(callback)
    try:
        training.run(2, 3)
    finally:
        training.train.callbacks.remove(callback)


FAILURES = {"forward": _fails_in_a_forward, "backward": _fails_in_a_backward, "update": _fails_in_an_update}


def _goes_on(folder, stage, failure):
    training = Training(Case(stage=stage)).run(0, 1)
    path = training.save(folder)
    error = error_of(FAILURES[failure], training)
    refused = error_of(training.save, folder / "other")
    training.load(path)
    found = training.run(1, 2).state()
    return error, refused, differences(found, Training(Case(stage=stage)).run(0, 2).state())


@pytest.mark.parametrize(("stage", "failure"), [(1, "update"), (2, "backward"), (3, "forward"), (3, "backward")])
def test_training_goes_on_after_a_failed_step_and_a_load(ranks2, tmp_path, stage, failure):
    for error, refused, found in ranks2.run(_goes_on, tmp_path, stage, failure):
        assert error.startswith("OSError: ")
        assert (refused is None) == (failure == "forward")
        assert found == []


def _is_freed(folder):
    training = Training(Case())
    path = training.save(folder)
    with mock.patch.object(load_module, "read_tensors", side_effect=OSError("no")):
        assert "no" in error_of(training.load, path)
    model = ref(training.model)
    del training
    gc.collect()
    gc.collect()
    return model() is None


def test_a_half_loaded_model_that_is_dropped_is_freed(ranks2, tmp_path):
    assert ranks2.run(_is_freed, Path(tmp_path)) == [True, True]

"""`zeroamp.EMA` against averages of whole weights that plain torch computes after each step."""

import logging

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.measuring.logs import log_lines
from tests.models.small import batch, loss_of
from tests.processes.training import config, full_parameters, wrapped
from zeroamp.optimizers.ema import EMA

NAME = "llama_untied"


def _training(cfg, seed=0):
    model = wrapped(NAME, cfg)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed)
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    ema = EMA(model, 0.75)
    train.callbacks.append(ema)
    return model, train, ema


def _run(model, train, steps):
    after = []
    for index in steps:
        loss = loss_of(model, batch(NAME, index * dist.get_world_size() + dist.get_rank()))
        train.backward(loss * (1e30 if index == 0 and train.loss_scale > 1 else 1.0))  # fp16: the first step overflows
        if not train.step().skipped:
            after.append(full_parameters(model))
    return after


def _averages(ema):
    return {name.removeprefix("EMA(0.75)."): average.full_tensor() for name, average in ema.tensors().items()}


def _same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _averaged(cfg):
    model, train, ema = _training(cfg)
    expected = {name: value.clone() for name, value in full_parameters(model).items()}
    weights = _run(model, train, range(4))
    for each in weights:
        for name, value in each.items():
            expected[name].lerp_(value, 0.25)
    with torch.no_grad():  # leaves the weights unsharded at stage 2
        loss_of(model, batch(NAME, 9))
        with ema.applied():
            inside = full_parameters(model)
            of_averages = loss_of(model, batch(NAME, 9))
        outside = loss_of(model, batch(NAME, 9))
    moved = not torch.equal(of_averages, outside)
    return (
        len(weights),
        _same(_averages(ema), expected),
        _same(inside, expected),
        moved,
        _same(full_parameters(model), weights[-1]),
    )


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_averages_have_the_bits_of_whole_weights(ranks2, stage):
    assert ranks2.run(_averaged, config(stage)) == [(4, True, True, True, True)] * 2


def test_a_skipped_step_does_not_count(ranks2):
    cfg = config(3, dtype="float16", fp16={"initial_scale_power": 10})
    assert ranks2.run(_averaged, cfg) == [(3, True, True, True, True)] * 2


def _saved(folder):
    model, train, ema = _training(config(3))
    _run(model, train, range(2))
    zeroamp.save_checkpoint(folder, model, train)
    _run(model, train, range(2, 4))
    return _averages(ema)


def _resumed(folder):
    model, train, ema = _training(config(2), seed=1)
    zeroamp.load_checkpoint(folder, model, train)
    _run(model, train, range(2, 4))
    return _averages(ema)


def test_a_checkpoint_holds_the_averages(ranks2, tmp_path):
    expected, found = ranks2.run(_saved, tmp_path)[0], ranks2.run(_resumed, tmp_path)[0]
    assert found.keys() == expected.keys()
    # Stages 2 and 3 have the same bits, so a resume at the other stage has them too.
    assert _same(found, expected)


def _late(folder):
    model, train, _ = _training(config(3))
    train.callbacks.clear()
    zeroamp.save_checkpoint(folder, model, train)
    again, with_averages, _ = _training(config(3), seed=1)
    before = full_parameters(again)
    with pytest.raises(zeroamp.CheckpointError, match="was not there at the save. Build it after the load"):
        zeroamp.load_checkpoint(folder, again, with_averages)
    return _same(full_parameters(again), before)


def test_a_checkpoint_without_averages_is_refused_before_anything_is_loaded(ranks2, tmp_path):
    assert ranks2.run(_late, tmp_path) == [True, True]


def _of_two_decays(folder):
    model, train, _ = _training(config(3))
    train.callbacks.append(EMA(model, 0.5))
    _run(model, train, range(2))
    zeroamp.save_checkpoint(folder, model, train)
    _run(model, train, range(2, 4))
    expected = [_averages(each) for each in train.callbacks]
    again, other, _ = _training(config(3), seed=1)
    other.callbacks.insert(0, EMA(again, 0.5))  # in another order
    zeroamp.load_checkpoint(folder, again, other)
    _run(again, other, range(2, 4))
    found = [_averages(each) for each in other.callbacks][::-1]
    plain, without, _ = _training(config(3), seed=1)
    without.callbacks.clear()
    with log_lines(logging.WARNING) as lines:
        zeroamp.load_checkpoint(folder, plain, without)
    without.callbacks += [EMA(plain, 0.5), EMA(plain, 0.5)]
    with pytest.raises(zeroamp.CheckpointError, match=r"Two callbacks have the tensor EMA\(0.5\)"):
        zeroamp.save_checkpoint(folder / "twice", plain, without)
    return [_same(one, two) for one, two in zip(found, expected, strict=True)], lines


def test_averages_are_loaded_by_their_decay_and_one_that_is_not_loaded_is_named(ranks2, tmp_path):
    for rank, (same, lines) in enumerate(ranks2.run(_of_two_decays, tmp_path)):
        assert same == [True, True]
        assert ["a callback that this TrainStep does not have" in line for line in lines] == [True] * (rank == 0)


def _inside_applied(folder):
    model, train, ema = _training(config(3))
    errors = []
    for call in (
        lambda: zeroamp.save_checkpoint(folder, model, train),
        lambda: ema.applied().__enter__(),
        lambda: train.backward(loss_of(model, batch(NAME, 0))),
    ):
        with ema.applied(), pytest.raises(zeroamp.ZeroAmpError) as error:
            call()
        errors.append(str(error.value))
    model, train, ema = _training(config(2, accumulation=2))
    train.backward(loss_of(model, batch(NAME, 0)))
    with pytest.raises(zeroamp.StepError, match="within an optimizer step"), ema.applied():
        pass
    return errors


def test_training_and_saves_are_refused_while_averages_are_applied(ranks2, tmp_path):
    for errors in ranks2.run(_inside_applied, tmp_path):
        assert ["inside of EMA.applied()" in error for error in errors] == [True] * 3


@pytest.mark.parametrize("decay", [1.0, -0.1])
def test_a_decay_that_averages_nothing_is_refused(decay):
    with pytest.raises(zeroamp.StepError, match="from 0 to below 1"):
        EMA(torch.nn.Linear(1, 1), decay)

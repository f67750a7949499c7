"""Optimizer state of a run without zeroamp: sharded when it is loaded, or refused then."""

import copy

import pytest
import torch

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.processes.training import config, full_parameters, same_bits, wrapped

NAME = "llama_untied"
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


def _one_process(make):
    """Two steps of plain torch, and its states before and after the second."""
    model = build(NAME)
    optimizer = make(model.parameters())
    states = []
    for index in range(2):
        states.append((copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())))
        loss_of(model, batch(NAME, index)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return states[1], {fqn: parameter.detach() for fqn, parameter in model.named_parameters()}


def _continued(stage, optimizer_name, is_late):
    make = OPTIMIZERS[optimizer_name]
    (weights, state), after = _one_process(make)
    model = wrapped(NAME, config(stage, dtype=None), prepare_before=lambda model: model.load_state_dict(weights))
    optimizer = make(model.parameters())
    if not is_late:
        optimizer.load_state_dict(state)
    train = zeroamp.TrainStep(model, optimizer)
    if is_late:
        optimizer.load_state_dict(state)
    train.backward(loss_of(model, batch(NAME, 1)))  # the same batch on both ranks: the average changes no bit
    train.step()
    return same_bits(full_parameters(model), after)


@pytest.mark.parametrize(
    ("stage", "optimizer_name", "is_late"),
    [(0, "AdamW", True), (3, "AdamW", False), (3, "SGD with momentum", True)],
)
def test_whole_tensors_are_sharded_when_they_are_loaded(ranks2, stage, optimizer_name, is_late):
    assert ranks2.run(_continued, stage, optimizer_name, is_late) == [[]] * 2


def _refused(kind):
    make = OPTIMIZERS["AdamW"]
    (_, state), _ = _one_process(make)
    if kind != "shards":
        state["state"] = dict(zip(state["state"], reversed(state["state"].values()), strict=True))
    model = wrapped(NAME, config(3, dtype=None))
    optimizer = make(model.parameters())
    if kind == "shards":
        for values, parameter in zip(state["state"].values(), model.parameters(), strict=True):
            values["exp_avg"] = parameter.detach().to_local().clone()
    if kind == "another order, before TrainStep":
        optimizer.load_state_dict(state)
        with pytest.raises(zeroamp.StepError) as caught:
            zeroamp.TrainStep(model, optimizer)
        return str(caught.value)
    train = zeroamp.TrainStep(model, optimizer)
    with pytest.raises(zeroamp.StepError) as caught:
        optimizer.load_state_dict(state)
    assert not optimizer.state
    train.backward(loss_of(model, batch(NAME, 1)))
    assert train.step().step == 1
    return str(caught.value)


@pytest.mark.parametrize("kind", ["another order", "shards", "another order, before TrainStep"])
def test_state_of_another_shape_is_refused(ranks2, kind):
    name = "embed.weight" if kind == "shards" else "blocks.0.qkv.weight"  # embedding and head have one shape
    for text in ranks2.run(_refused, kind):
        assert f'AdamW was given the state "exp_avg" of {name} as a plain tensor of shape' in text
        assert "or a checkpoint by zeroamp.load_checkpoint" in text

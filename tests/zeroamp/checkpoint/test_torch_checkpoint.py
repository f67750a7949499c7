"""`torch.distributed.checkpoint` in a plain loop: how Adam's moments are loaded, and how they are lost."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import zeroamp
from tests.processes.training import config, full_parameters, same_bits


def _new():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    model = zeroamp.wrap_model(model, zeroamp.policy_from_config(config(3, dtype=None)), auto_wrap_policy={"Linear"})
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _train(model, optimizer, steps):
    for step in steps:
        (model(torch.ones(2, 4)) - step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _resumed(folder, is_raw):
    """Return which parameters differ from those of a run that was not stopped, and the number of loaded states."""

    def states(model, optimizer):
        of_optimizer = optimizer.state_dict() if is_raw else get_optimizer_state_dict(model, optimizer)
        return {"model": model.state_dict(), "optimizer": of_optimizer}

    model, optimizer = _new()
    _train(model, optimizer, range(2))
    dcp.save(states(model, optimizer), checkpoint_id=folder)
    _train(model, optimizer, range(2, 4))
    expected = full_parameters(model)
    model, optimizer = _new()
    found = states(model, optimizer)
    dcp.load(found, checkpoint_id=folder)
    if is_raw:
        optimizer.load_state_dict(found["optimizer"])
    else:
        set_optimizer_state_dict(model, optimizer, found["optimizer"])
    num_loaded = len(optimizer.state)
    _train(model, optimizer, range(2, 4))
    return same_bits(full_parameters(model), expected) == [], num_loaded


@pytest.mark.parametrize(("is_raw", "expected"), [(False, (True, 4)), (True, (False, 0))], ids=["by torch", "raw"])
def test_moments_are_loaded_by_get_optimizer_state_dict_alone(ranks2, tmp_path, is_raw, expected):
    """Nothing of the raw state is loaded, the step count neither: a new optimizer cannot be told from such a one."""
    assert ranks2.run(_resumed, tmp_path, is_raw) == [expected] * 2


def _saved_by_a_writer_that_copies(folder):
    """Save and load with a writer that describes the files in a copy of the metadata, as that of torch 2.11 does."""
    finish = dcp.FileSystemWriter.finish

    def on_copy(writer, metadata, results):
        finish(writer, dataclasses.replace(metadata), results)

    model, optimizer = _new()
    train = zeroamp.TrainStep(model, optimizer)
    with mock.patch.object(dcp.FileSystemWriter, "finish", on_copy):
        zeroamp.save_checkpoint(folder, model, train)
    expected = full_parameters(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    zeroamp.load_checkpoint(folder, model, train)
    return same_bits(full_parameters(model), expected)


def test_the_layout_does_not_depend_on_the_writers_metadata(ranks2, tmp_path):
    assert ranks2.run(_saved_by_a_writer_that_copies, str(tmp_path)) == [[], []]

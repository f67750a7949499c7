"""`sleep` and `wake`: the bits of a run that never slept, nothing left on the device, and errors in between."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.measuring.state_bytes import bytes_of
from tests.models.small import batch, loss_of
from tests.processes.training import config, full_parameters, same_bits, wrapped
from zeroamp.host_memory import sleep as sleeping
from zeroamp.host_memory.storages import HostCopies
from zeroamp.wrapping.state import wrap_state

NAME = "llama_untied"
PARTS = ("params", "grads", "optimizer")


def _train(stage, rests, **more):
    """Train, and call `rests(model, step)` between the optimizer steps. Return losses and parameters."""
    model = wrapped(NAME, config(stage, **more))
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for index in range(4):
        loss = loss_of(model, batch(NAME, 2 * index + dist.get_rank()))
        losses.append(float(loss.detach()))
        step.backward(loss)
        step.step()
        with torch.no_grad():
            loss_of(model, batch(NAME, 7))  # leaves units unsharded
        rests(model, step)
    return losses, full_parameters(model)


def _rest(model, step):
    """Let the parts sleep together, and one by one in all orders."""
    before = {part: bytes_of(model, step.optimizers[0], part) for part in PARTS}
    zeroamp.sleep(model, step.optimizers)
    assert [bytes_of(model, step.optimizers[0], part) for part in PARTS] == [0, 0, 0]
    zeroamp.wake(model)
    for order in itertools.permutations(PARTS):
        for part in order:
            zeroamp.sleep(model, step.optimizers, [part])
        for part in order:
            zeroamp.wake(model, [part])
    assert {part: bytes_of(model, step.optimizers[0], part) for part in PARTS} == before


def _both(stage, more):
    awake, asleep = _train(stage, lambda *_: None, **more), _train(stage, _rest, **more)
    return awake[0] == asleep[0], same_bits(awake[1], asleep[1])


@pytest.mark.parametrize(
    ("stage", "more"),
    [(0, {}), (1, {}), (2, {"dtype": "float16", "fp16": {"initial_scale_power": 4}}), (3, {})],
)
def test_the_bits_are_those_without_sleep(ranks2, stage, more):
    assert ranks2.run(_both, stage, more) == [(True, [])] * 2


def _texts(folder):
    """Return the error of each call that needs what sleeps."""
    model = wrapped(NAME, config(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, batch(NAME, dist.get_rank())).backward()
    optimizer.step()
    step = zeroamp.TrainStep(model, optimizer)

    def error(action):
        try:
            action()
        except zeroamp.ZeroAmpError as found:
            return str(found)
        return ""

    inputs, block = batch(NAME, 0), list(wrap_state(model).units.values())[1]
    zeroamp.sleep(model, optimizer)
    texts = {
        "forward": error(lambda: model(inputs)),
        "block": error(lambda: block(torch.ones(1, 2, 8))),
        "step": error(optimizer.step),
        "state_dict": error(model.state_dict),
        "optimizer.state_dict": error(optimizer.state_dict),
        "save": error(lambda: zeroamp.save_checkpoint(folder, model, step)),
        "export": error(lambda: zeroamp.export_hf(model, folder)),
        "explain": error(lambda: zeroamp.explain(model)),
        "whole": error(lambda: zeroamp.full_parameter(next(model.parameters()))),
    }
    nested = error(lambda: zeroamp.sleep(model, optimizer, ["params"]))
    zeroamp.wake(model)
    again = error(lambda: zeroamp.wake(model, ["grads"]))
    wrong = error(lambda: zeroamp.sleep(model, optimizer, ["buffers"]))
    optimizer.zero_grad()
    step.backward(loss_of(model, inputs), is_last=False)
    return texts, nested, again, wrong, error(lambda: zeroamp.sleep(model))


def test_what_needs_the_state_is_an_error_that_says_to_wake_it(ranks2, tmp_path):
    for texts, nested, again, wrong, inside in ranks2.run(_texts, tmp_path):
        assert "is not one of a wrapped model" in texts.pop("whole")
        assert {name: text for name, text in texts.items() if "zeroamp.wake(model)" not in text} == {}
        assert "params, which is asleep already. Call wake first" in nested
        assert "grads, which is awake already" in again
        assert "must be a list of params, grads, optimizer, but is ['buffers']" in wrong
        assert "zeroamp.sleep was called between the micro-batches" in inside


def _misused(fault):
    """Return the parameters after a refused call while asleep, or after host memory was full, and those without."""
    found = []
    for is_faulty in (False, True):
        model = wrapped(NAME, config(3, zeroamp={"offload_between_steps": ["optimizer"]}))
        step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for index in range(3):
            step.backward(loss_of(model, batch(NAME, index)))
            step.step()
            if is_faulty:
                fault(model, step.optimizers[0])
                zeroamp.wake(model)
        found.append(full_parameters(model))
    return same_bits(*found)


def _refused_read(model, optimizer):
    zeroamp.sleep(model, optimizer)
    with pytest.raises(zeroamp.StepError, match="asleep"):
        optimizer.state_dict()  # brings back what offload_between_steps holds


def _full_host(model, optimizer):
    results = [mock.DEFAULT, mock.DEFAULT, MemoryError]
    with (
        mock.patch.object(sleeping, "HostCopies", wraps=HostCopies, side_effect=results),
        pytest.raises(MemoryError),
    ):
        zeroamp.sleep(model, optimizer)


def _step_of_another(model, _optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    zeroamp.sleep(model)
    with pytest.raises(zeroamp.StepError, match="asleep"):
        torch.optim.SGD(model.parameters(), lr=0.0).step()
    zeroamp.wake(model)
    model.zero_grad()


@pytest.mark.parametrize("fault", [_refused_read, _full_host, _step_of_another])
def test_a_refused_call_loses_nothing(ranks2, fault):
    assert ranks2.run(_misused, fault) == [[], []]

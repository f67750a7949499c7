"""`sleep` and `wake`: the bits of a run that never slept, nothing left on the device, and errors in between."""

import gc
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.measuring.state_bytes import bytes_of
from tests.models.small import batch, loss_of
from tests.processes.training import SmallTraining, adamw, check_errors, config, errors_of, same_bits, wrapped
from zeroamp.hooks.collectives import gradient_reduction
from zeroamp.host_memory import sleep as sleeping
from zeroamp.host_memory.storages import HostCopies
from zeroamp.wrapping.state import wrap_state

NAME = "llama_untied"
PARTS = ("params", "grads", "optimizer")


def _train(stage, rests, **more):
    """Train, and call `rests(training)` between the optimizer steps. Return losses and parameters."""
    training = SmallTraining(config(stage, **more), adamw, name=NAME)
    losses = []
    for index in range(2):
        losses.append(training.step(index).loss)
        with torch.no_grad():
            training.loss(7)  # leaves units unsharded
        rests(training)
    return losses, training.parameters()


def _rest(training):
    """Let the parts sleep together, and one by one in all orders."""
    model, optimizer = training.model, training.optimizer
    before = {part: bytes_of(model, optimizer, part) for part in PARTS}
    zeroamp.sleep(model, optimizer)
    assert [bytes_of(model, optimizer, part) for part in PARTS] == [0, 0, 0]
    zeroamp.wake(model)
    for order in itertools.permutations(PARTS):
        for part in order:
            zeroamp.sleep(model, optimizer, [part])
        for part in order:
            zeroamp.wake(model, [part])
    assert {part: bytes_of(model, optimizer, part) for part in PARTS} == before


def _both(stage, more):
    awake, asleep = _train(stage, lambda _: None, **more), _train(stage, _rest, **more)
    return awake[0] == asleep[0], same_bits(awake[1], asleep[1])


@pytest.mark.parametrize(
    ("stage", "more"),
    [(0, {}), (2, {"dtype": "float16", "fp16": {"initial_scale_power": 4}}), (3, {})],
)
def test_the_bits_are_those_without_sleep(ranks2, stage, more):
    assert ranks2.run(_both, stage, more) == [(True, [])] * 2


def _refused(folder):
    """Return the error of each call that needs what sleeps, and of calls of `sleep` and `wake` out of turn."""
    model = wrapped(NAME, config(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, batch(NAME, dist.get_rank())).backward()
    optimizer.step()
    step = zeroamp.TrainStep(model, optimizer)
    inputs, block = batch(NAME, 0), list(wrap_state(model).units.values())[1]
    zeroamp.sleep(model, optimizer)
    texts = errors_of(
        {
            "forward": lambda: model(inputs),
            "block": lambda: block(torch.ones(1, 2, 8)),
            "step": optimizer.step,
            "state_dict": model.state_dict,
            "optimizer.state_dict": optimizer.state_dict,
            "save": lambda: zeroamp.save_checkpoint(folder, model, step),
            "export": lambda: zeroamp.export_hf(model, folder),
            "explain": lambda: zeroamp.explain(model),
            "whole": lambda: zeroamp.full_parameter(next(model.parameters())),
            "nested": lambda: zeroamp.sleep(model, optimizer, ["params"]),
        }
    )
    zeroamp.wake(model)
    optimizer.zero_grad()

    def inside():
        step.backward(loss_of(model, inputs), is_last=False)
        zeroamp.sleep(model)

    others = {
        "again": lambda: zeroamp.wake(model, ["grads"]),
        "wrong": lambda: zeroamp.sleep(model, optimizer, ["buffers"]),
        "no optimizer": lambda: zeroamp.sleep(model, step),
        "inside": inside,
    }
    return {**texts, **errors_of(others)}


REFUSED = {
    **dict.fromkeys(("forward", "block", "step", "state_dict", "optimizer.state_dict"), r"zeroamp.wake\(model\)"),
    **dict.fromkeys(("save", "export", "explain", "whole"), r"zeroamp.wake\(model\)"),
    "nested": "params, which is asleep already. Call wake first",
    "again": "grads, which is awake already",
    "wrong": r"must be a list of params, grads, optimizer, but is \['buffers'\]",
    "no optimizer": r"must be optimizers, but contains a TrainStep. Pass train\.optimizers",
    "inside": "zeroamp.sleep was called between the micro-batches",
}


def test_what_needs_the_state_is_an_error_that_says_to_wake_it(ranks2, tmp_path):
    check_errors(ranks2.run(_refused, tmp_path), REFUSED)


def _misused(fault):
    """Return the parameters after a refused call while asleep, or after host memory was full, and those without."""
    found = []
    for is_faulty in (False, True):
        training = SmallTraining(config(3, zeroamp={"offload_between_steps": ["optimizer"]}), adamw, name=NAME)
        for index in range(3):
            training.step(index)
            if is_faulty:
                fault(training.model, training.optimizer)
                zeroamp.wake(training.model)
        found.append(training.parameters())
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


def _bytes_in_bf16():
    """Bytes of the storages of all live tensors in bf16, in which this model's gradients are sent."""
    gc.collect()
    live = (each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.dtype == torch.bfloat16)
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in live}
    return sum(storages.values())


def _receive_buffers():
    """Train as on an accelerator, which retains receive buffers. Return their bytes before, in and after a sleep."""
    found = []
    with mock.patch.object(gradient_reduction, "_is_kept", return_value=True):
        before = _bytes_in_bf16()
        training = SmallTraining(config(3), adamw, name=NAME)
        for index, what in enumerate([PARTS, ["optimizer"]]):
            training.step(index)
            found.append(_bytes_in_bf16() - before)
            zeroamp.sleep(training.model, training.optimizer, what)
            found.append(_bytes_in_bf16() - before)
            zeroamp.wake(training.model)
        training.step(2)
        found.append(_bytes_in_bf16() - before)
        groups = [group for group in zeroamp.explain(training.model).group_rows() if group["communication"] == "bf16"]
    return found, max(2 * group["elements"] for group in groups)


def test_sleep_releases_receive_buffers_until_the_next_backward(ranks2):
    for found, largest in ranks2.run(_receive_buffers):
        assert found == [largest, 0, largest, 0, largest]

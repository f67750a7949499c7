"""The calls of a library's loop for two optimizers of one model, in and out of order."""

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.small import batch, loss_of
from tests.processes.training import config, wrapped
from zeroamp.integrations.loop_driver import LoopDriver

NAME = "llama_tied"


def _calls_of_two_optimizers():
    model = wrapped(NAME, config(2))
    parameters = list(model.parameters())
    loop = LoopDriver(model, "accumulate().", reopens=True)
    loop.add([torch.optim.SGD(parameters[::2], lr=0.1), torch.optim.SGD(parameters[1::2], lr=0.1)])
    first, second = loop.optimizers

    def loss():
        return loss_of(model, batch(NAME, dist.get_rank()))

    def raises(text, call, *args):
        with pytest.raises(zeroamp.StepError, match=text):
            call(*args)

    loop.backward(loss())
    loop.step(first)
    assert loop.report is None
    raises("after the step of another optimizer", loop.clip_norm, 1.0)
    raises(r"SGD.step\(\) was called again without a backward", loop.step, first)
    raises(r"unused gradients of an earlier one \(SGD\)", loop.backward, loss())
    loop.step(second)
    assert loop.report.step == 1
    raises("without a last backward", loop.step, first)

    loop.backward(loss())
    loop.clip_norm(1.0)
    raises("clipped twice", loop.clip_norm, 1.0)
    loop.zero_grad(first)
    loop.zero_grad(second)  # the optimizer step is discarded, with all that was done in it
    loop.backward(loss())
    loop.clip_norm(1.0)
    loop.step(first)
    loop.zero_grad(second)
    return loop.report.step


def test_an_optimizer_step_ends_with_its_last_optimizer(ranks2):
    """It forgets what was done."""
    assert ranks2.run(_calls_of_two_optimizers) == [2, 2]

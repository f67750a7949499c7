"""Several forwards in one `train.autocast()`: the bits of one `torch.autocast` around them."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.models.small import batch, loss_of
from tests.oracles import one_process
from tests.processes.training import SmallTraining, adamw, config, same_bits

NAME = "encoder"  # the in_proj of its MultiheadAttention is fp32, and autocast casts it
NUM_STEPS = 3


def _loss(model, inputs, *, is_reference):
    """A loss of two forwards with gradients. With `is_reference`, a third one without gradients runs first."""
    if is_reference:
        with torch.no_grad():
            reference = loss_of(model, inputs.flip(1))
    first, second = (loss_of(model, inputs.roll(part, 1)) for part in (0, 1))
    return first * second + (reference - first if is_reference else 0)


def _trained(stage, is_reference):
    training = SmallTraining(config(stage, comm="fp32"), adamw, name=NAME)
    losses = []
    for step in range(NUM_STEPS):
        with training.train.autocast():
            inputs = batch(NAME, 2 * step + dist.get_rank())
            loss = _loss(training.model, inputs, is_reference=is_reference)
        losses.append(float(loss.detach()))
        training.train.backward(loss)
        training.train.step()
    return losses, training.parameters()


class _Uncached(torch.nn.Module):
    """A model whose forwards without gradients run without autocast's cache.

    In plain torch they would cache casts without gradients.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=torch.is_grad_enabled()):
            return loss_of(self.model, inputs)


def _loss_in_one_process(model, inputs, *, is_reference):
    return _loss(_Uncached(model), inputs, is_reference=is_reference)


@pytest.mark.parametrize(
    ("stage", "is_reference"),
    [(0, True), pytest.param(1, True, marks=pytest.mark.slow), (3, False), (3, True)],
)
def test_two_forwards_have_the_bits_of_one_region(ranks2, stage, is_reference):
    loss_fn = partial(_loss_in_one_process, is_reference=is_reference)
    losses, _, parameters = one_process.train(NAME, world_size=2, num_steps=NUM_STEPS, loss_fn=loss_fn)
    for rank, (own_losses, own_parameters) in enumerate(ranks2.run(_trained, stage, is_reference)):
        assert own_losses == [loss for ranks in losses for loss in ranks[rank]]
        assert same_bits(own_parameters, parameters) == []

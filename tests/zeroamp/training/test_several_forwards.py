"""Several forwards in one `train.autocast()`: the bits of one `torch.autocast` around them."""

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.processes.training import config, full_parameters, same_bits
from tests.selection import slow_but

NAME = "encoder"  # the in_proj of its MultiheadAttention is fp32, and autocast casts it
NUM_STEPS = 3


def _loss(model, index, *, is_reference):
    """A loss of two forwards with gradients. With `is_reference`, a third one without gradients runs first."""
    if is_reference:
        with torch.no_grad():
            reference = loss_of(model, batch(NAME, 900 + index))
    first, second = (loss_of(model, batch(NAME, 2 * index + part)) for part in (0, 1))
    return first * second + (reference - first if is_reference else 0)


def _train(stage, is_reference):
    model = zeroamp.wrap_model(build(NAME), zeroamp.policy_from_config(config(stage, comm="fp32")))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for step in range(NUM_STEPS):
        with train.autocast():
            loss = _loss(model, 2 * step + dist.get_rank(), is_reference=is_reference)
        losses.append(float(loss.detach()))
        train.backward(loss)
        train.step()
    return losses, full_parameters(model)


def _one_process(is_reference):
    model = build(NAME)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = [[], []]
    for step in range(NUM_STEPS):
        gradients = []
        for rank in range(2):
            # A forward without gradients caches casts without gradients in plain torch: it gets no cache.
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = _loss(_Uncached(model), 2 * step + rank, is_reference=is_reference)
            losses[rank].append(float(loss.detach()))
            gradients.append(torch.autograd.grad(loss, parameters))
        for parameter, one, other in zip(parameters, *gradients, strict=True):
            parameter.grad = (one.float() + other.float()) / 2
        optimizer.step()
    return losses, {fqn: parameter.detach() for fqn, parameter in model.named_parameters()}


class _Uncached(torch.nn.Module):
    """A model whose forwards without gradients run without autocast's cache."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=torch.is_grad_enabled()):
            return loss_of(self.model, inputs)


@pytest.mark.parametrize("is_reference", [False, True], ids=["contrastive", "with a reference"])
@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_two_forwards_have_the_bits_of_one_region(ranks2, stage, is_reference):
    losses, parameters = _one_process(is_reference)
    for rank, (own_losses, own_parameters) in enumerate(ranks2.run(_train, stage, is_reference)):
        assert own_losses == losses[rank]
        assert same_bits(own_parameters, parameters) == []

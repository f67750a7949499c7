"""Ranks that take other paths through the model: one order of reductions, or one error, never sums of other groups."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zeroamp
from tests.oracles.one_process import combine
from tests.processes.training import config, full_parameters, same_bits

WIDTH, NUM_STEPS = 16, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class ImagesAndText(nn.Module):
    """The vision part has the size of a block, and belongs to the root. The embedding is frozen."""

    def __init__(self):
        super().__init__()
        self.embed, self.visual = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 2 * WIDTH + 2, bias=False)
        self.text = nn.ModuleList(Block() for _ in range(3))
        self.embed.requires_grad_(False)

    def forward(self, tokens, image=None):
        x = self.embed(tokens)
        if image is not None:
            x = x + self.visual(image)[..., :WIDTH]
        for block in self.text:
            x = block(x)
        return x.float().pow(2).mean()


def _seeded(make):
    torch.manual_seed(0)
    return make()


def _inputs(rank, step, has_image):
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 8, (2, 4), generator=generator)
    return tokens, torch.randn(2, 4, WIDTH, generator=generator) if has_image else None


def _one_process(have_images):
    """Losses by step and rank, and parameters, of one process that takes the ranks' batches in turn."""
    model = _seeded(ImagesAndText)
    named = {fqn: parameter for fqn, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(NUM_STEPS):
        gradients, of_ranks = [], []
        for rank, has_image in enumerate(have_images):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(*_inputs(rank, step, has_image))
            of_ranks.append(float(loss.detach()))
            gradients.append(torch.autograd.grad(loss, list(named.values()), allow_unused=True))
        for parameter, table in zip(named.values(), zip(*gradients, strict=True), strict=True):
            parameter.grad = combine([[gradient] for gradient in table], True)
        losses.append(of_ranks)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {fqn: parameter.detach() for fqn, parameter in model.named_parameters()}


def _wrapped(make, stage, **more):
    return zeroamp.wrap_model(_seeded(make), config(stage, **more), auto_wrap_policy={"Block"})


def _train(stage, have_images, in_train_step):
    model, rank = _wrapped(ImagesAndText, stage), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = zeroamp.TrainStep(model, optimizer) if in_train_step else None
    losses = []
    for step in range(NUM_STEPS):
        loss = model(*_inputs(rank, step, have_images[rank]))
        losses.append(float(loss.detach()))
        if train is not None:
            train.backward(loss)
            train.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses, full_parameters(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("in_train_step", [False, True], ids=["plain loop", "TrainStep"])
def test_an_image_on_one_rank_gives_bits_of_one_process(ranks2, stage, in_train_step):
    have_images = (True, False)
    losses, parameters = _one_process(have_images)
    for rank, (own, ours) in enumerate(ranks2.run(_train, stage, have_images, in_train_step)):
        assert own == [of_step[rank] for of_step in losses]
        assert same_bits(ours, parameters) == []

"""`requires_grad` that changes between the micro-batches of an optimizer step: bit for bit as in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.processes.training import config, full_parameters, same_bits
from tests.selection import slow_but
from zeroamp.training.step import TrainStep

NUM_RANKS, NUM_MICRO_BATCHES, NUM_STEPS = 2, 3, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).float().square().mean()


def _toggle(model, step, micro):
    """Freeze and unfreeze, before the forward of a micro-batch, through the parameters that the model has then."""
    named = dict(model.named_parameters())
    if micro == 1:
        named["blocks.0.0.weight"].requires_grad_(step == 1)
        named["blocks.1.1.weight"].requires_grad_(False)
    if micro == 2:
        named["blocks.1.2.weight"].requires_grad_(step != 0)
        named["blocks.1.1.weight"].requires_grad_(True)
        named["head.weight"].requires_grad_(step == 0)


def _prepare(model):
    model.blocks[0][0].weight.requires_grad_(False)


def _inputs(step, micro, rank):
    index = (step * NUM_MICRO_BATCHES + micro) * NUM_RANKS + rank
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(index))


def _train(stage):
    torch.manual_seed(0)
    # bf16 communication would round the sum of the micro-batches at stage 1.
    cfg = config(stage, accumulation=NUM_MICRO_BATCHES, comm="fp32")
    model = Net()
    _prepare(model)
    model = zeroamp.wrap_model(model, zeroamp.policy_from_config(cfg), auto_wrap_policy={"Sequential"})
    train = TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
    losses = []
    for step in range(NUM_STEPS):
        for micro in range(NUM_MICRO_BATCHES):
            _toggle(model, step, micro)
            loss = model(_inputs(step, micro, dist.get_rank()))
            losses.append(float(loss.detach()))
            train.backward(loss)
            train.step()
    return losses, full_parameters(model), {fqn: p.requires_grad for fqn, p in model.named_parameters()}


def _one_process(reduce_each):
    torch.manual_seed(0)
    model = Net()
    _prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = [[] for _ in range(NUM_RANKS)]
    for step in range(NUM_STEPS):
        by_rank = [{} for _ in range(NUM_RANKS)]  # sums over micro-batches
        for micro in range(NUM_MICRO_BATCHES):
            _toggle(model, step, micro)
            for rank in range(NUM_RANKS):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(_inputs(step, micro, rank))
                losses[rank].append(float(loss.detach()))
                trained = {fqn: p for fqn, p in model.named_parameters() if p.requires_grad}
                gradients = torch.autograd.grad(loss / NUM_MICRO_BATCHES, list(trained.values()))
                for fqn, gradient in zip(trained, gradients, strict=True):
                    by_rank[rank].setdefault(fqn, []).append(gradient)
        for fqn, parameter in model.named_parameters():
            table = [sums[fqn] for sums in by_rank if fqn in sums]
            if table and reduce_each:
                parameter.grad = sum(sum(micros) / NUM_RANKS for micros in zip(*table, strict=True))
            elif table:
                parameter.grad = sum(sum(micros) for micros in table) / NUM_RANKS
        optimizer.step()
        optimizer.zero_grad()
    parameters = {fqn: p.detach() for fqn, p in model.named_parameters()}
    return losses, parameters, {fqn: p.requires_grad for fqn, p in model.named_parameters()}


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 1, 3))
def test_toggled_between_micro_batches(ranks2, stage):
    losses, parameters, flags = _one_process(reduce_each=stage >= 2)
    for rank, run in enumerate(ranks2.run(_train, stage)):
        assert run[0] == losses[rank]
        assert same_bits(run[1], parameters) == []
        assert run[2] == flags

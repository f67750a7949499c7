"""Parameters that no rank, or only some ranks, used in an optimizer step: bit for bit as in one process."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroamp
from tests.processes.training import config, full_parameters, same_bits
from tests.selection import slow_but
from zeroamp.training.step import TrainStep

NUM_RANKS = 2


class Graph(nn.Module):
    """Blocks with branches, and a tower of which the last layer's output is not used.

    branches: of each of the three blocks, "left", "right", "both" or "none"; "skip" leaves the block out.
    """

    def __init__(self):
        super().__init__()
        self.tower = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2))
        self.blocks = nn.ModuleList(GraphBlock() for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.never = nn.Linear(8, 8)

    def forward(self, x, branches):
        states = [x]
        for layer in self.tower:
            states.append(layer(states[-1]))
        x = states[-2]  # as LLaVA does
        for block, branch in zip(self.blocks, branches, strict=True):
            if branch != "skip":
                x = block(x, branch)
        return self.head(x).float().square().mean()


class GraphBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.left_norm, self.right_norm = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x, branch):
        left = self.left_norm(self.left(x)) if branch in ("left", "both") else 0
        right = self.right_norm(self.right(x)) if branch in ("right", "both") else 0
        return x + left + right


UNITS = {"GraphBlock", "Sequential"}

# steps[step][micro-batch][rank] -> the branches of the three blocks
ALIKE = [
    [[("left", "both", "right")] * 2],
    [[("left", "skip", "both")] * 2],
    [[("both", "left", "skip")] * 2],
    [[("none", "left", "both")] * 2],
]
DIFFERENT = [
    [[("left", "both", "right"), ("right", "both", "left")]],
    [[("left", "none", "both"), ("both", "left", "none")]],
    [[("none", "left", "left"), ("none", "right", "left")]],
]
MICRO_BATCHES = [
    [[("left", "none", "skip")] * 2, [("both", "left", "right")] * 2],
    [[("left", "both", "right"), ("none", "both", "right")], [("skip", "right", "none"), ("skip", "right", "left")]],
    [[("both", "left", "right")] * 2, [("left", "skip", "none")] * 2],
]
ROUTES = {"alike": ALIKE, "different": DIFFERENT, "micro-batches": MICRO_BATCHES}
OPTIMIZERS = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "SGD": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1),
}


def _inputs(index):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(index))


def _index(step, micro, rank):
    return (step * 10 + micro) * NUM_RANKS + rank


def _train(stage, routes, optimizer, mesh_shape=None):
    """Return (losses of this rank, names without gradient per step, parameters)."""
    torch.manual_seed(0)
    accumulation = len(ROUTES[routes][0])
    # bf16 communication would round the sum of the micro-batches at stage 1.
    cfg = config(stage, accumulation=accumulation, clip=0.5, comm="fp32" if accumulation > 1 else None)
    mesh = None if mesh_shape is None else init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    model = zeroamp.wrap_model(Graph(), zeroamp.policy_from_config(cfg), mesh, UNITS)
    train = TrainStep(model, OPTIMIZERS[optimizer](model.parameters()))
    rank, losses, without = dist.get_rank(), [], []
    for step, micro_batches in enumerate(ROUTES[routes]):
        for micro, by_rank in enumerate(micro_batches):
            loss = model(_inputs(_index(step, micro, rank)), by_rank[rank])
            losses.append(float(loss.detach()))
            train.backward(loss, is_last=micro + 1 == accumulation)
        train.clip_grad_norm()
        without.append([fqn for fqn, p in model.named_parameters() if p.grad is None])
        train.update()
    return losses, without, full_parameters(model)


def _one_process(stage, routes, optimizer):
    """The oracle, in plain torch: losses[rank], names without gradient per step, parameters."""
    torch.manual_seed(0)
    model = Graph()
    named = dict(model.named_parameters())
    stepper = OPTIMIZERS[optimizer](model.parameters())
    losses, without = [[] for _ in range(NUM_RANKS)], []
    for step, micro_batches in enumerate(ROUTES[routes]):
        gradients = []  # [micro][rank] -> one per parameter, or None
        for micro, by_rank in enumerate(micro_batches):
            gradients.append([])
            for rank, route in enumerate(by_rank):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(_inputs(_index(step, micro, rank)), route)
                losses[rank].append(float(loss.detach()))
                scaled = loss / len(micro_batches)
                gradients[-1].append(torch.autograd.grad(scaled, list(named.values()), allow_unused=True))
        for index, parameter in enumerate(named.values()):
            table = [[ranks[rank][index] for rank in range(NUM_RANKS)] for ranks in gradients]
            parameter.grad = (
                _mean(table) if stage >= 2 else _mean([[_sum(ranks) for ranks in zip(*table, strict=True)]])
            )
        without.append([fqn for fqn, p in named.items() if p.grad is None])
        norm = torch.stack([p.grad.double().square().sum() for p in named.values() if p.grad is not None]).sum().sqrt()
        factor = (0.5 / (norm.float() + 1e-6)).clamp(max=1.0)
        for parameter in named.values():
            if parameter.grad is not None:
                parameter.grad *= factor
        stepper.step()
        stepper.zero_grad()
    return losses, without, {fqn: p.detach() for fqn, p in named.items()}


def _sum(gradients):
    """The sum of those that are there, or None."""
    found = [gradient.float() for gradient in gradients if gradient is not None]
    return functools.reduce(torch.add, found) if found else None


def _mean(table):
    """table[micro][rank]: the mean over ranks, with zeros for None, summed over micro-batches; None if all are None."""
    means = [None if (total := _sum(ranks)) is None else total / NUM_RANKS for ranks in table]
    return _sum(means)


@pytest.mark.parametrize("optimizer", slow_but(OPTIMIZERS, "AdamW"))
@pytest.mark.parametrize("routes", ROUTES)
@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_the_same_bits_as_in_one_process(ranks2, stage, routes, optimizer):
    losses, without, parameters = _one_process(stage, routes, optimizer)
    for rank, run in enumerate(ranks2.run(_train, stage, routes, optimizer)):
        assert run[0] == losses[rank]
        assert run[1] == without
        assert same_bits(run[2], parameters) == []


@pytest.mark.parametrize("stage", [2, 3])
def test_replicas_sum_micro_batches_first_also_of_units_that_the_last_one_skips(ranks2, stage):
    # One rank per replica: each sums its micro-batches, as at stage 0, and the sums are averaged.
    losses, without, parameters = _one_process(0, "micro-batches", "AdamW")
    for rank, run in enumerate(ranks2.run(_train, stage, "micro-batches", "AdamW", (2, 1))):
        assert run[0] == losses[rank]
        assert run[1] == without
        assert same_bits(run[2], parameters) == []

"""Parameters that no rank, or only some ranks, used or trained in an optimizer step: bit for bit as in one process."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.oracles import one_process
from tests.processes.training import config, full_parameters, mesh_of, same_bits
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
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def _toggle(model, step, micro):
    """Freeze and unfreeze, before the forward of a micro-batch, through the parameters that the model has then."""
    named = dict(model.named_parameters())
    if micro == 0 and step == 0:
        named["blocks.0.left.weight"].requires_grad_(False)
    if micro == 1:
        named["blocks.0.left.weight"].requires_grad_(step == 1)
        named["blocks.1.left_norm.weight"].requires_grad_(False)
    if micro == 2:
        named["blocks.1.right.weight"].requires_grad_(step != 0)
        named["blocks.1.left_norm.weight"].requires_grad_(True)
        named["head.weight"].requires_grad_(step == 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is used and trained in each micro-batch."""

    routes: list
    """[step][micro-batch][rank]: the branches of the three blocks."""
    prepare: Callable = lambda model, step, micro: None
    """Called with the model before each micro-batch."""
    clip: float = 0.5


DIFFERENT = [
    [[("left", "both", "right"), ("right", "both", "left")]],
    [[("left", "none", "both"), ("both", "left", "none")]],
    [[("none", "left", "left"), ("none", "right", "left")]],
]
CASES = {
    "different": Case(routes=DIFFERENT),
    "micro-batches": Case(
        routes=[
            [[("left", "none", "skip")] * 2, [("both", "left", "right")] * 2],
            [
                [("left", "both", "right"), ("none", "both", "right")],
                [("skip", "right", "none"), ("skip", "right", "left")],
            ],
            [[("both", "left", "right")] * 2, [("left", "skip", "none")] * 2],
        ]
    ),
    "toggled requires_grad": Case(routes=[[[("both", "both", "both")] * 2] * 3] * 3, prepare=_toggle, clip=0.0),
}


def _inputs(step, micro, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed((step * 10 + micro) * NUM_RANKS + rank))


def _train(stage, name, mesh_shape=None):
    """Return this rank's losses, the names without gradient per step, the parameters, and their `requires_grad`."""
    torch.manual_seed(0)
    case = CASES[name]
    accumulation = len(case.routes[0])
    # bf16 communication would round the sum of the micro-batches at stage 1.
    cfg = config(stage, accumulation=accumulation, clip=case.clip)
    model = zeroamp.wrap_model(Graph(), zeroamp.policy_from_config(cfg), mesh_of(mesh_shape), UNITS)
    train = TrainStep(model, ADAMW(model.parameters()))
    rank, losses, without = dist.get_rank(), [], []
    for step, micro_batches in enumerate(case.routes):
        for micro, by_rank in enumerate(micro_batches):
            case.prepare(model, step, micro)
            loss = model(_inputs(step, micro, rank), by_rank[rank])
            losses.append(float(loss.detach()))
            train.backward(loss, is_last=micro + 1 == accumulation)
        train.clip_grad_norm()
        without.append([fqn for fqn, p in model.named_parameters() if p.grad is None])
        train.update()
    is_trained = {fqn: p.requires_grad for fqn, p in model.named_parameters()}
    return losses, without, full_parameters(model), is_trained


def _one_process(stage, name):
    """Return what `_train` does, in plain torch; the losses are [rank]."""
    torch.manual_seed(0)
    model, case = Graph(), CASES[name]
    named = dict(model.named_parameters())
    stepper = ADAMW(model.parameters())
    losses, without = [[] for _ in range(NUM_RANKS)], []
    for step, micro_batches in enumerate(case.routes):
        gradients = []  # [micro][rank] -> {fqn: gradient}, without those that were not used or not trained
        for micro, by_rank in enumerate(micro_batches):
            case.prepare(model, step, micro)
            gradients.append([])
            for rank, route in enumerate(by_rank):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(_inputs(step, micro, rank), route)
                losses[rank].append(float(loss.detach()))
                trained = {fqn: p for fqn, p in named.items() if p.requires_grad}
                found = torch.autograd.grad(loss / len(micro_batches), list(trained.values()), allow_unused=True)
                gradients[-1].append(dict(zip(trained, found, strict=True)))
        for fqn, parameter in named.items():
            table = [[of_rank.get(fqn) for of_rank in ranks] for ranks in gradients]
            parameter.grad = one_process.combine(list(zip(*table, strict=True)), reduce_each=stage >= 2)
        without.append([fqn for fqn, p in named.items() if p.grad is None])
        one_process.clip_norm(model, case.clip)
        stepper.step()
        stepper.zero_grad()
    parameters = {fqn: p.detach() for fqn, p in named.items()}
    is_trained = {fqn: p.requires_grad for fqn, p in named.items()}
    return losses, without, parameters, is_trained


def _check(runs, expected):
    losses, without, parameters, is_trained = expected
    for rank, (own_losses, own_without, own_parameters, own_is_trained) in enumerate(runs):
        assert own_losses == losses[rank]
        assert own_without == without
        assert same_bits(own_parameters, parameters) == []
        assert own_is_trained == is_trained


FAST = (("different", 0), ("different", 3), ("micro-batches", 0), ("toggled requires_grad", 3))


@pytest.mark.parametrize("case", slow_but([*itertools.product(CASES, range(4))], *FAST), ids="{0[0]} {0[1]}".format)
def test_the_same_bits_as_in_one_process(ranks2, case):
    name, stage = case
    _check(ranks2.run(_train, stage, name), _one_process(stage, name))


@pytest.mark.parametrize("stage", slow_but([2, 3], 3))
def test_replicas_sum_micro_batches_first(ranks2, stage):
    # One rank per replica: each sums its micro-batches, as at stage 0, and the sums are averaged.
    """Replicas sum micro batches first also of units that the last one skips."""
    _check(ranks2.run(_train, stage, "micro-batches", (2, 1)), _one_process(0, "micro-batches"))


class _MaySkip(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, is_used):
        x = self.always(x)
        return (x + self.sometimes(x) if is_used else x).float().square().mean()


def _without_gradient(loop, options, mesh_shape):
    """Return the FQNs without a gradient in two steps: of the first one, only the first micro-batch uses all."""
    torch.manual_seed(0)
    accumulation = 2 if loop == "TrainStep" else 1
    policy = zeroamp.policy_from_config(config(2, accumulation=accumulation, **options))
    model = zeroamp.wrap_model(_MaySkip(), policy, mesh_of(mesh_shape))
    optimizer, found = ADAMW(model.parameters()), []
    train = TrainStep(model, optimizer) if loop == "TrainStep" else None
    for is_used in ((True, False), (False, False)):
        for micro in range(2):
            loss = model(_inputs(0, micro, dist.get_rank()), is_used[micro])
            if train is not None:
                train.backward(loss, is_last=micro == 1)
            else:
                model.set_requires_all_reduce(micro == 1)
                loss.backward()
        train.clip_grad_norm() if train is not None else optimizer.step()
        found.append([fqn for fqn, p in model.named_parameters() if p.grad is None])
        train.update() if train is not None else optimizer.zero_grad()
    return found


NATIVE = {"zeroamp": {"reduce_accumulate_dtype": "native"}}
LOOPS = {
    "sums in fp32": ("TrainStep", {}, None),
    "sums in bf16": ("TrainStep", {"data_types": {"grad_accum_dtype": "bf16"}}, None),
    "reproducible": ("TrainStep", {"zeroamp": {"reproducible": True}}, None),
    "native sums of replicas": ("TrainStep", NATIVE, (2, 1)),
    "native sums of replicas in a plain loop": ("plain loop", NATIVE, (2, 1)),
    "sums of replicas in a plain loop": ("plain loop", {}, (2, 1)),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_gradient_of_an_earlier_micro_batch_stays(ranks2, name):
    """Zeros of the last micro-batch discard no sum, wherever the sum of the earlier ones is held."""
    assert ranks2.run(_without_gradient, *LOOPS[name]) == [[[], ["sometimes.weight", "sometimes.bias"]]] * NUM_RANKS

"""`zeroamp.optional_units`: modules that only some ranks run in a step, such as a vision tower."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zeroamp
from tests.oracles import one_process
from tests.processes.training import config, full_parameters, same_bits
from tests.selection import slow_but
from zeroamp.planning.plan import build_plan

NUM_RANKS = 2
WIDTH = 16
OPTIONAL = {"zeroamp": {"optional_units": ["visual", "Audio"]}}
MODES = {"autocast": {}, "bf16": {"dtype": None, "bf16": {"enabled": True}}}
SGD = functools.partial(torch.optim.SGD, lr=1 / 16, momentum=0.9, weight_decay=0.1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = self.patch(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Audio(Tower):
    pass


class Multimodal(nn.Module):
    """A text model whose first hidden states have what two towers add; both are left out without their input."""

    def __init__(self, frozen):
        super().__init__()
        self.visual, self.audio = Tower(), Audio()
        self.embed = nn.Embedding(40, WIDTH).requires_grad_(not frozen)
        self.text = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40)

    def forward(self, tokens, image=None, sound=None):
        x = self.embed(tokens)
        x = x if image is None else x + self.visual(image)
        x = x if sound is None else x + self.audio(sound)
        for block in self.text:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens.roll(-1, 1).flatten())


def _built(frozen):
    torch.manual_seed(0)
    return Multimodal(frozen)


def _inputs(step, rank, has):
    """The inputs of a rank's step. has: a letter per tower that runs, "i" and "s"."""
    made = torch.Generator().manual_seed(step * NUM_RANKS + rank)
    tokens = torch.randint(0, 40, (2, 5), generator=made)
    image, sound = (torch.randn(2, 5, 6, generator=made) for _ in range(2))
    return tokens, image if "i" in has else None, sound if "s" in has else None


# The letters of each rank, by step.
BOTH_TOWERS = [("is", ""), ("", "s"), ("", ""), ("s", "i")]
ON_ALL_OR_NONE = [("is", "is"), ("", ""), ("i", "i")]


def _train(stage, mode, routes, frozen, *, with_step, threshold=None, autocast=None):
    """Return (losses of this rank, FQNs without gradient per step, parameters)."""
    cfg = config(stage, **MODES[mode], **OPTIONAL, threshold=threshold)
    model = zeroamp.wrap_model(_built(frozen), zeroamp.policy_from_config(cfg))
    optimizer = SGD(model.parameters())
    train = zeroamp.TrainStep(model, optimizer) if with_step else None
    names = {parameter: fqn for fqn, parameter in model.named_parameters()}
    losses, without, rank = [], [], dist.get_rank()
    optimizer.register_step_pre_hook(lambda *_: without.append([names[p] for p in names if p.grad is None]))
    for step, by_rank in enumerate(routes):
        loss = model(*_inputs(step, rank, by_rank[rank]))
        losses.append(float(loss.detach()))
        if train is not None:
            train.backward(loss)
            assert train.step() is not None
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses, without, full_parameters(model)


def _one_process(mode, routes, frozen):
    """What `_train` does, in plain torch; the losses are [rank]."""
    model = _built(frozen)
    named = {fqn: p for fqn, p in model.named_parameters() if p.requires_grad}
    optimizer = SGD(model.parameters())
    losses, without = [[] for _ in range(NUM_RANKS)], []
    for step, by_rank in enumerate(routes):
        gradients = []
        for rank, has in enumerate(by_rank):
            run, inputs, context = model, _inputs(step, rank, has), torch.autocast("cpu", dtype=torch.bfloat16)
            if mode == "bf16":
                run, context = _built(frozen).bfloat16(), nullcontext()
                run.load_state_dict(model.state_dict())
                inputs = [each.bfloat16() if each is not None and each.is_floating_point() else each for each in inputs]
            with context:
                loss = run(*inputs)
            losses[rank].append(float(loss.detach()))
            leaves = [p for p in run.parameters() if p.requires_grad]
            gradients.append(torch.autograd.grad(loss, leaves, allow_unused=True))
        for position, parameter in enumerate(named.values()):
            parameter.grad = one_process.combine([[of_rank[position]] for of_rank in gradients], reduce_each=False)
        without.append([fqn for fqn, p in model.named_parameters() if p.grad is None])
        optimizer.step()
        optimizer.zero_grad()
    return losses, without, {fqn: p.detach() for fqn, p in model.named_parameters()}


def _at_stages(stages, *args, **options):
    return {stage: _train(stage, *args, **options) for stage in stages}


def _check(ranks, stages, mode, routes, frozen, **options):
    losses, without, parameters = _one_process(mode, routes, frozen)
    for rank, by_stage in enumerate(ranks.run(_at_stages, stages, mode, routes, frozen, **options)):
        for stage, (own_losses, own_without, own_parameters) in by_stage.items():
            assert own_losses == losses[rank], stage
            assert own_without == without, stage
            assert same_bits(own_parameters, parameters) == [], stage


ALL = (0, 1, 2, 3)
CASES = {
    "plain loop": ((0, 3), "autocast", BOTH_TOWERS, False, {"with_step": False}),
    "TrainStep": ((1, 2), "autocast", BOTH_TOWERS, False, {"with_step": True}),
    "bf16": (ALL, "bf16", BOTH_TOWERS, False, {"with_step": True}),
    "own units and typed groups": (ALL, "autocast", BOTH_TOWERS, False, {"with_step": False, "threshold": 8}),
    "frozen embedding, the same towers": (ALL, "autocast", ON_ALL_OR_NONE, True, {"with_step": False}),
    "frozen embedding": ((3,), "autocast", BOTH_TOWERS, True, {"with_step": False}),
    "frozen embedding, TrainStep": (ALL, "autocast", BOTH_TOWERS, True, {"with_step": True}),
}


@pytest.mark.parametrize("name", slow_but(CASES, "plain loop", "TrainStep", "frozen embedding"))
def test_towers_on_any_ranks_have_the_bits_of_one_process(ranks2, name):
    stages, mode, routes, frozen, options = CASES[name]
    _check(ranks2, stages, mode, routes, frozen, **options)


def _units(stage, **more):
    plan = build_plan(_built(False), config(stage, **more))
    return set(plan.units), {group.unit for group in plan.groups if any("visual" in p.fqn for p in group.params)}


def test_optional_modules_belong_to_the_unit_around_them():
    units, owners = _units(3, threshold=8)
    assert {"visual.blocks.0", "audio.blocks.1", "text.0", "embed", "head"} <= units
    units, owners = _units(3, threshold=8, **OPTIONAL)
    assert (units, owners) == ({"text.0", "text.1", "embed", "head"}, {""})
    units, _ = _units(3, zeroamp={"optional_units": ["blocks.0"]})
    assert units == {"visual.blocks.1", "audio.blocks.1", "text.0", "text.1"}


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("visuals", r"zeroamp.optional_units: 'visuals' matches no module .*of Multimodal\. Did you mean 'visual'\?"),
        ("head.weight", r"'head.weight' matches no module"),
        ("Multimodal", r"'Multimodal' matches the root, .* runs on each rank\. Name modules inside it"),
    ],
)
def test_a_pattern_without_a_module_is_an_error(pattern, text):
    with pytest.raises(zeroamp.ConfigError, match=text):
        _units(3, zeroamp={"optional_units": [pattern]})

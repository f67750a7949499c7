"""What every rank runs in the tests of checkpoints: a small model with all that one can hold, trained in parts."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import zeroamp
from tests.processes import training
from tests.processes.training import config, full_parameters, policy

VOCAB, WIDTH, INNER = 13, 6, 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class Small(nn.Module):
    """Tied weights, dropout, odd sizes and fewer rows than ranks, a frozen parameter, buffers that differ by rank."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("constant", torch.arange(3.0))

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale + self.frozen
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.float().mean((0, 1)), 0.1)
                self.num_seen += 1 + dist.get_rank()
        x = x - self.mean.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


class WithoutFrozen(Small):
    def __init__(self):
        super().__init__()
        del self.frozen
        self.frozen = 0.0


def _two_groups(parameters):
    return torch.optim.AdamW(
        [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 3e-3, "betas": (0.8, 0.9)}]
    )


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "two groups": _two_groups,
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "trainable only": lambda p: torch.optim.AdamW([q for q in p if q.requires_grad], lr=1e-2),
    "some only": lambda p: torch.optim.AdamW(p[3:5], lr=1e-2),
}
SCHEDULERS = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 15),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
}


@dataclass
class Case:
    """One way to train."""

    stage: int = 3
    optimizer: str | Callable[[list[nn.Parameter]], torch.optim.Optimizer] = "adamw"
    scheduler: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Of `tests.training.config`."""
    mesh_shape: tuple[int, ...] | None = None
    group_size: int | None = None
    """Ranks that train together, neighbours; all by default."""
    evaluate_in: Callable[[], AbstractContextManager[Any]] | None = None
    """What an evaluation after every step runs in; None: there is none."""
    overflow_at: tuple[int, ...] = ()
    """Steps whose loss overflows on rank 1."""
    steps: tuple[int, int] = (2, 2)
    async_: bool = False
    build: Callable[[], nn.Module] = Small


def group_of(case):
    """Return which of the groups this rank is in."""
    return dist.get_rank() // (case.group_size or dist.get_world_size())


def mesh_of(case):
    if case.group_size is not None:
        first = group_of(case) * case.group_size
        ranks = list(range(first, first + case.group_size))
        group = dist.new_group(ranks, use_local_synchronization=True)
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    return training.mesh_of(case.mesh_shape)


class Training:
    """A model in training; `case` says how, `seed` where it starts."""

    def __init__(self, case, seed=0):
        self.case = case
        cfg = config(case.stage, **case.options)
        self.accumulation = cfg["gradient_accumulation_steps"]
        torch.manual_seed(seed)
        self.model = zeroamp.wrap_model(case.build(), policy(cfg), mesh_of(case))
        make_optimizer = OPTIMIZERS[case.optimizer] if isinstance(case.optimizer, str) else case.optimizer
        self.optimizer = make_optimizer(list(self.model.parameters()))
        self.scheduler = None if case.scheduler is None else SCHEDULERS[case.scheduler](self.optimizer)
        self.train = zeroamp.TrainStep(self.model, self.optimizer, self.scheduler)
        for seed_random in (torch.manual_seed, random.seed, np.random.seed):
            seed_random(100 * seed + dist.get_rank())
        self.log = []
        """Per step: losses, norm, loss scale, whether it was skipped, learning rates."""

    def run(self, first, last):
        """Take the steps from `first` to `last`, that one not included."""
        for index in range(first, last):
            self._step(index)
        return self

    def _step(self, index):
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        losses = []
        for micro in range(self.accumulation):
            generator = torch.Generator().manual_seed((index * self.accumulation + micro) * num_ranks + rank)
            loss = self.model(torch.randint(0, VOCAB, (2, 5), generator=generator))
            losses.append(float(loss.detach()))
            overflow = index in self.case.overflow_at and rank == 1
            self.train.backward(loss * (1e30 if overflow else 1.0))
            report = self.train.step()
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.log.append((losses, report.grad_norm, report.loss_scale, report.skipped, rates))
        if self.case.evaluate_in is not None:
            with self.case.evaluate_in():
                self.log.append(float(self.model.eval()(torch.arange(VOCAB)[None]).detach()))
            self.model.train()

    def save(self, folder, **more):
        return zeroamp.save_checkpoint(folder, self.model, self.train, **more)

    def load(self, folder, **more):
        return zeroamp.load_checkpoint(folder, self.model, self.train, **more)

    def state(self):
        """Everything that decides how training goes on, in full tensors and plain values; draws random numbers."""
        zeroamp.wrapping.state.reshard(self.model.modules())
        names = {id(p): name for name, p in self.model.named_parameters()}
        tensors = full_parameters(self.model) | {name: b.clone() for name, b in self.model.named_buffers()}
        values = {
            "train": self.train.state_dict(),
            "scheduler": None if self.scheduler is None else plain(self.scheduler.state_dict()),
            "groups": [
                {**plain(group), "params": [names[id(p)] for p in group["params"]]}
                for group in self.optimizer.param_groups
            ],
            "random": (random.random(), float(np.random.rand()), float(torch.rand(()))),
        }
        for parameter, entries in self.optimizer.state.items():
            for key, value in entries.items():
                name = f"{names[id(parameter)]}.{key}"
                if isinstance(value, torch.Tensor):
                    tensors[name] = full(value)
                else:
                    values[name] = value
        return tensors, values


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def plain(values):
    """Return plain values without the parameters and schedulers among them."""
    if isinstance(values, dict):
        return {key: plain(value) for key, value in values.items() if key != "params"}
    if isinstance(values, list | tuple):
        return [plain(value) for value in values]
    return values.tolist() if isinstance(values, torch.Tensor) else values


def differences(ours, theirs, *, but_random=False):
    """Return the names of what differs in any bit between two states of `Training.state`.

    but_random: leave out the random numbers, where trainings share one generator.
    """
    found = [f"only in one: {sorted(ours[0].keys() ^ theirs[0].keys())}"] if ours[0].keys() != theirs[0].keys() else []
    for name in ours[0].keys() & theirs[0].keys():
        one, other = ours[0][name], theirs[0][name]
        if one.dtype != other.dtype or not torch.equal(one, other):
            found.append(name)
    found += [
        f"{name}: {ours[1].get(name)} {theirs[1].get(name)}" for name in ours[1] if ours[1][name] != theirs[1].get(name)
    ]
    return [text for text in found if not (but_random and text.startswith("random"))]


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A training that was saved, and another start that loaded it and went on."""

    differing: list[str]
    """What differs between the two at their end."""
    log: list[Any]
    """Of the one that was saved."""


def resume(folder, case, *, uninterrupted=False):
    """Save a training and let it go on; let another start load it and go on; return the `Resumed`.

    uninterrupted: also compare with a training that is never saved.
    """
    first, last = case.steps[0], sum(case.steps)
    folder = f"{folder}/{group_of(case)}"
    saved = Training(case).run(0, first)
    saved.save(folder, extra={"at": first}, async_=case.async_)
    saved.run(first, last)
    zeroamp.wait_for_save(saved.model)
    after = saved.state()
    resumed = Training(case, seed=7).run(0, 1)  # other weights, states and random numbers: all must be replaced
    resumed.log.clear()
    for group in resumed.optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] += 0.5  # as a script that was changed: the checkpoint's value must return
    extra = resumed.load(folder)
    resumed.run(first, last)
    found = differences(resumed.state(), after)
    if extra != {"at": first} or repr(resumed.log) != repr(saved.log[-len(resumed.log) :]):
        found.append("the log")
    if uninterrupted:
        never_saved = Training(case).run(0, last)
        if repr(never_saved.log) != repr(saved.log):  # repr, for a norm may be nan
            found.append("the log of the uninterrupted run")
        found += differences(never_saved.state(), after)
    return Resumed(differing=found, log=saved.log)


def error_of(call, *args, **kwargs):
    """Return the class and text of what a call raises, None if nothing."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def refused(training, call, *args, **kwargs):
    """Return the error of a call and what it changed."""
    generators = torch.get_rng_state()
    before = training.state()
    torch.set_rng_state(generators)
    error = error_of(call, *args, **kwargs)
    drawn = torch.equal(generators, torch.get_rng_state())
    changed = differences(training.state(), before, but_random=True)
    return error, changed + ["random"] * (not drawn)

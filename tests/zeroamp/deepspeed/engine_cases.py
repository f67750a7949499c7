"""What ranks run in the tests of the engine."""

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

import zeroamp.deepspeed as deepspeed
from tests.models.small import batch, build, loss_of
from tests.processes import training
from tests.processes.training import Run, adamw, full_parameters

NAME = "llama_tied"
config = partial(training.config, train_micro_batch_size_per_gpu=2)


def start(cfg):
    """An engine with an optimizer that was built before, as scripts do."""
    model = build(NAME)
    return deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=cfg)[0]


def loss_at(engine, index):
    """The loss of micro-batch number `index` of this rank."""
    return loss_of(engine, batch(NAME, index * dist.get_world_size() + dist.get_rank()))


def train(cfg, num_steps, *, first=0, engine=None):
    """Train with a step() after each backward, as DeepSpeed's scripts do."""
    engine = engine or start(cfg)
    accumulation = engine.gradient_accumulation_steps()
    losses, norms = [], []
    for index in range(first, first + num_steps):
        losses.append([])
        for micro in range(accumulation):
            loss = loss_at(engine, index * accumulation + micro)
            losses[-1].append(float(loss.detach()))
            assert engine.is_gradient_accumulation_boundary() == (micro + 1 == accumulation)
            divided = engine.backward(loss)
            assert torch.equal(divided, loss.detach() / accumulation)
            engine.step()
            assert engine.was_step_applied() == (micro + 1 == accumulation)
        norms.append(engine.get_global_grad_norm())
    return Run(losses=losses, norms=norms, parameters=full_parameters(engine.module))


def by_boundary(cfg, counts, *, in_no_sync=False):
    """Train with optimizer steps of different numbers of micro-batches, and one step() at the end of each."""
    engine = start(cfg)
    losses, norms, done = [], [], 0
    for count in counts:
        losses.append([])
        for micro in range(count):
            is_last = micro + 1 == count
            if not in_no_sync:
                engine.set_gradient_accumulation_boundary(is_last)
            with engine.no_sync() if in_no_sync and not is_last else nullcontext():
                loss = loss_at(engine, done)
                engine.backward(loss.float() / count, scale_wrt_gas=False)
            losses[-1].append(float(loss.detach()))
            done += 1
        engine.step()
        norms.append(engine.get_global_grad_norm())
    assert engine.global_steps == len(counts)
    return Run(losses=losses, norms=norms, parameters=full_parameters(engine.module))


def several_backwards(cfg, num_steps, boundary=None):
    """Train with two micro-batches per step(), each in a backward of its own, as DeepSpeed's GAN does."""
    engine, losses, norms, means = start(cfg), [], [], []
    engine.set_gradient_accumulation_boundary(boundary)
    num_micro = 2 * engine.gradient_accumulation_steps()
    for index in range(num_steps):
        losses.append([])
        for micro in range(num_micro):
            loss = loss_at(engine, index * num_micro + micro)
            losses[-1].append(float(loss.detach()))
            engine.backward(loss.float() / 2)
            if micro % 2:
                engine.step()
                assert engine.was_step_applied() == (micro + 1 == num_micro)
        norms.append(engine.get_global_grad_norm())
        means.append(float(engine.report.loss))
    assert engine.global_steps == num_steps
    return Run(losses=losses, norms=norms, mean_losses=means, parameters=full_parameters(engine.module))

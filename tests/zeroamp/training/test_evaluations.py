"""Evaluations change nothing in training: before the first forward, between micro-batches, and before the update."""

import time

import pytest
import torch

import zeroamp
from tests.measuring.allocated import Allocated
from tests.models.small import batch
from tests.processes.training import SmallTraining, adamw, config, same_bits, wrapped


def _trained(cfg, mesh_shape, context):
    """The parameters, what the evaluations returned, and the collectives of the evaluations before each step."""
    training = SmallTraining(cfg, adamw, mesh_shape=mesh_shape)
    model = training.model
    zeroamp.register_forward_method(model, "logits")
    calls, outputs = [], []

    def evaluate(forward):
        if context is None:
            return
        before = dict(zeroamp.traffic(model).calls)
        model.eval()
        with context():
            outputs.append(forward(batch(training.name, 5)).float().mean().item())
        model.train()
        calls.append({key: n - before.get(key, 0) for key, n in zeroamp.traffic(model).calls.items()})

    for step in range(3):
        evaluate(model.logits if step == 0 else model)
        for micro in range(2):
            training.backward(2 * step + micro)
            evaluate(model)
            if micro == 0:
                training.train.step()
        training.train.clip_grad_norm()
        if context is not None:  # leaves groups unsharded, with the weights before the update
            model(batch(training.name, 6))
        training.train.update()
    return training.parameters(), outputs, calls[::3]


CASES = {
    "stage 0": (config(0, accumulation=2), None, torch.inference_mode),
    "stage 3, no_grad": (config(3, accumulation=2), None, torch.no_grad),
    "replicas": (config(3, accumulation=2), (2, 1), torch.inference_mode),
}


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_with_evaluations(ranks2, name):
    cfg, mesh_shape, context = CASES[name]
    of_ranks = zip(*(ranks2.run(_trained, cfg, mesh_shape, each) for each in (context, None)), strict=True)
    for (ours, outputs, calls), (plain, *_) in of_ranks:
        assert same_bits(ours, plain) == []
        assert all(output == output for output in outputs)
        assert calls[1] == calls[2], "only the first evaluation unshards ahead"


def _losses_after_a_prefetch_that_no_block_used():
    """Losses of a training in which an evaluation prefetches a block that it skips, and without the evaluation."""
    found = []
    for evaluates in (True, False):
        training = SmallTraining(config(3, threshold=0), adamw)
        model = training.model
        training.step(0)
        if evaluates:
            blocks = model.blocks
            blocks[0].set_modules_to_forward_prefetch([blocks[1]])
            model.blocks = blocks[:1]
            with torch.no_grad():
                model(batch(training.name, 5))
            blocks[0].set_modules_to_forward_prefetch([])
            model.blocks = blocks
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
            found.append(training.loss(1))
    return found


def test_a_prefetch_that_no_forward_waited_for_is_discarded(ranks2):
    """A later forward would read the weights from before a change."""
    for with_evaluation, without in ranks2.run(_losses_after_a_prefetch_that_no_block_used):
        assert torch.equal(with_evaluation, without)


def _held_by_a_teacher(stage):
    """Bytes that a frozen model holds after a forward, beside its shards; and the most that it held in the forward."""
    with Allocated() as allocated:
        model = wrapped(
            "two_blocks_untied", config(stage), prepare_before=lambda model: model.requires_grad_(False).eval()
        )
        before = allocated.now
        allocated.reset_peak()
        with torch.no_grad():
            model(batch("two_blocks_untied", 0))
        end = time.monotonic() + 2
        while allocated.now > before and time.monotonic() < end:
            time.sleep(0.01)  # gloo's threads release what they sent a moment after the collective
        return allocated.now - before, allocated.peak - before


@pytest.mark.parametrize("stage", [2, 3])
def test_a_frozen_model_holds_its_shards_alone_after_a_forward(ranks2, stage):
    """As the teachers of docs/losses.md, and the encoders of a diffusion model, whose forwards alternate."""
    for held, most in ranks2.run(_held_by_a_teacher, stage):
        assert held == 0
        assert most > 20_000  # unsharded blocks

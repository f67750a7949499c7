"""A loss that the caller computes from outputs of the model: exact under `train.autocast()`, warned of in bf16.

Of several forwards, it has the bits of one `torch.autocast` around them.
"""

import logging
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

import zeroamp
from tests.measuring.logs import log_lines
from tests.models.small import loss_of
from tests.oracles import one_process
from tests.processes.training import check_runs, config, train

NUM_STEPS = 2


def outside(model, tokens):
    """A product with the logits, which autocast runs in bf16, then a log-softmax, which it runs in fp32."""
    logits = model.logits(tokens)
    logits = logits @ torch.eye(logits.shape[-1])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _of_low_logits(model, tokens):
    return F.cross_entropy(model.logits(tokens)[:, :-1].flatten(0, 1).bfloat16(), tokens[:, 1:].flatten())


def of_two_forwards(model, tokens):
    return loss_of(model, tokens) * loss_of(model, tokens.roll(1, 1))


def with_a_reference(model, tokens):
    """A forward without gradients runs first."""
    with torch.no_grad():
        reference = loss_of(model, tokens.flip(1))
    return of_two_forwards(model, tokens) + reference - loss_of(model, tokens)


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


def _with_an_uncached_reference(model, tokens):
    return with_a_reference(_Uncached(model), tokens)


def _register(model):
    if hasattr(model, "logits"):
        zeroamp.register_forward_method(model, "logits")


def _trained(name, stage, loss_fn, options, *, is_inside=True):
    """The run, and what is warned of. `is_inside`: whether the loss is computed in `train.autocast()`."""

    def compute(step, tokens):
        with step.autocast() if is_inside else nullcontext():
            return loss_fn(step.model, tokens)

    with log_lines(logging.INFO) as lines:
        run = train(name, config(stage, **options), NUM_STEPS, prepare=_register, loss_fn=compute)
    return run, [line for line in lines if "TrainStep.backward" in line]


@pytest.mark.parametrize(
    ("name", "stage", "loss_fn", "in_one_process", "options"),
    [
        ("two_blocks_untied", 0, outside, outside, {}),
        ("two_blocks_untied", 3, outside, outside, {}),
        # The in_proj of its MultiheadAttention is fp32, and autocast casts it.
        ("encoder", 0, with_a_reference, _with_an_uncached_reference, {"comm": "fp32"}),
        ("encoder", 3, with_a_reference, _with_an_uncached_reference, {"comm": "fp32"}),
    ],
)
def test_under_train_autocast_it_has_the_bits_of_one_process(ranks2, name, stage, loss_fn, in_one_process, options):
    oracle = one_process.train(name, world_size=2, num_steps=NUM_STEPS, loss_fn=in_one_process)
    runs, warnings = zip(*ranks2.run(_trained, name, stage, loss_fn, options), strict=True)
    check_runs(runs, oracle)
    assert warnings == ([], [])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "with train.autocast():`, or, if it was there already, from logits.float()"),
        ({"dtype": None, "bf16": {"enabled": True}}, "Compute it from logits.float()"),
    ],
    ids=["autocast", "bf16"],
)
def test_a_low_precision_loss_is_warned_of_once_with_the_remedy(ranks2, options, text):
    (_, warnings), (_, of_second_rank) = ranks2.run(
        _trained, "two_blocks_untied", 3, _of_low_logits, options, is_inside=False
    )
    assert len(warnings) == 1
    assert "bf16" in warnings[0]
    assert text in warnings[0]
    assert of_second_rank == []

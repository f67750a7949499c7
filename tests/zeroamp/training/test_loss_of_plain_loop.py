"""`loss = loss_fn(model(inputs), labels)` in a plain loop: the bits of one process with autocast around both."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import zeroamp
from tests.processes.training import config, full_parameters, same_bits
from tests.selection import slow_but

NUM_STEPS = 2
AUTOCAST = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
LOSSES = {
    "cross_entropy": lambda logits, labels: F.cross_entropy(logits, labels.argmax(-1)),
    "mse_loss": F.mse_loss,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
}
MODES = {
    "autocast": {},
    "bf16": {"dtype": None, "bf16": {"enabled": True}},
    "fp16": {"dtype": None, "fp16": {"enabled": True}},
}


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 5))


def _batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.rand(8, 5, generator=generator)


def _plain_loop(model, loss_fn, forward):
    """Train by `loss_fn(forward(model, inputs), labels)`. Return the losses, those of evaluations too."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(NUM_STEPS):
        inputs, labels = _batch(step)
        with torch.no_grad():
            evaluated = loss_fn(forward(model, inputs), labels)
        loss = loss_fn(forward(model, inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses += [evaluated.item(), loss.item()]
    return losses


def _call(model, inputs):
    return model(inputs)


def _in_bf16(model, inputs):
    low = {fqn: parameter.to(torch.bfloat16) for fqn, parameter in model.named_parameters()}
    return torch.func.functional_call(model, low, inputs.bfloat16()).float()


def _wrapped(network, stage, mode, units):
    policy = zeroamp.policy_from_config(config(stage, **MODES[mode]))
    return zeroamp.wrap_model(network, policy, auto_wrap_policy=units)


def _of_one_process(loss_fn, mode):
    """The oracle. In autocast mode, autocast surrounds forward and loss."""
    model = _network()
    if mode == "bf16":
        return _plain_loop(model, loss_fn, _in_bf16), model

    def under_autocast(logits, labels):
        with AUTOCAST():
            return loss_fn(logits, labels)

    def forward(model, inputs):
        with AUTOCAST(cache_enabled=torch.is_grad_enabled()):
            return model(inputs)

    return _plain_loop(model, under_autocast, forward), model


def _differing(stage, mode):
    found = {}
    for name, loss_fn in LOSSES.items():
        expected, plain = _of_one_process(loss_fn, mode)
        model = _wrapped(_network(), stage, mode, {"Linear"})
        losses = _plain_loop(model, loss_fn, _call)
        found[name] = (losses == expected, same_bits(full_parameters(model), dict(plain.named_parameters())))
    return found


CASES = {f"{mode} {stage}": (stage, mode) for mode in ("autocast", "bf16") for stage in range(4)}


@pytest.mark.parametrize("name", slow_but(CASES, "autocast 0", "autocast 3", "bf16 3"))
def test_a_loss_outside_has_the_bits_of_one_process(ranks2, name):
    """Both ranks have the same batches, so that the average over ranks changes no bit."""
    for found in ranks2.run(_differing, *CASES[name]):
        assert found == dict.fromkeys(LOSSES, (True, []))


class _Dict(nn.Module):
    """Returns logits beside a cache; with `labels` also a loss. `encode` is for `register_forward_method`."""

    def __init__(self):
        super().__init__()
        self.network = _network()

    def encode(self, inputs):
        return self.network(inputs)

    def forward(self, inputs, labels=None):
        logits = self.network(inputs)
        loss = {} if labels is None else {"loss": F.mse_loss(logits, labels)}
        return {**loss, "logits": logits, "caches": [(logits.detach(), logits.clone())]}


def _dtypes_of(mode):
    model = _wrapped(_Dict(), 3, mode, {"Linear"})
    zeroamp.register_forward_method(model, "encode")
    inputs, labels = _batch(0)
    found = {"method": model.encode(inputs).dtype, "with a loss": model(inputs, labels)["logits"].dtype}
    for name, context in {
        "training": nullcontext,
        "evaluation": torch.no_grad,
        "inference": torch.inference_mode,
    }.items():
        with context():
            output = model(inputs)
        found[name] = [output["logits"].dtype, *(each.dtype for each in output["caches"][0])]
    if mode == "autocast":
        with AUTOCAST():
            found["under autocast"] = model(inputs)["logits"].dtype
    return found


@pytest.mark.parametrize("mode", MODES)
def test_outputs_are_fp32_unless_they_have_a_loss(ranks2, mode):
    low, fp32 = torch.float16 if mode == "fp16" else torch.bfloat16, torch.float32
    expected = {
        "method": fp32,
        "with a loss": low,
        "training": [fp32, low, fp32],
        "evaluation": [fp32, low, low],
        "inference": [fp32, low, low],
    }
    if mode == "autocast":
        expected["under autocast"] = low
    assert ranks2.run(_dtypes_of, mode)[0] == expected


def _loss_of_fsdp2_alone():
    model = fully_shard(_network(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    inputs, labels = _batch(0)
    return F.cross_entropy(model(inputs), labels.argmax(-1)).dtype


def test_fsdp2_alone_computes_it_in_bf16(ranks2):
    assert set(ranks2.run(_loss_of_fsdp2_alone)) == {torch.bfloat16}

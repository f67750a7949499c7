"""A wrapped model inside the caller's own autocast: on ranks, compiled or not."""

from contextlib import nullcontext

import pytest
import torch
from torch.distributed.tensor import DTensor

import zeroamp
from tests.models.small import batch, loss_of
from tests.processes.training import config, train, wrapped
from tests.selection import slow_but

NAME = "llama_untied"
MODES = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "loss_scale": 128}}}


def _outer(name):
    dtypes = {"same": torch.bfloat16, "other dtype": torch.float16}
    if name == "disabled":
        return torch.autocast("cpu", enabled=False)
    return torch.autocast("cpu", dtype=dtypes[name]) if name in dtypes else nullcontext()


def _train_inside(outer, compiled):
    model = wrapped(NAME, config(3))
    if compiled:
        for block in model.blocks:
            block.compile(backend="eager")
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for index in range(3):
        with _outer(outer):
            loss = loss_of(model, batch(NAME, index))
        losses.append(float(loss.detach()))
        step.backward(loss)
        losses.append(step.step().grad_norm)
    return losses


@pytest.mark.parametrize("compiled", slow_but([False, True], False), ids=["eager", "compiled"])
def test_the_configs_autocast_wins_bit_for_bit(ranks2, compiled):
    plain, *others = [
        ranks2.run(_train_inside, outer, compiled)[0] for outer in ("none", "same", "other dtype", "disabled")
    ]
    assert all(other == plain for other in others)


def _refused_then_goes_on(mode):
    model = wrapped(NAME, config(3, dtype=None, **MODES[mode]))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(zeroamp.PrecisionError, match=f"{mode} precision"):
        loss_of(model, batch(NAME, 0))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step.backward(loss_of(model, batch(NAME, 0)))
    return step.step().grad_norm


@pytest.mark.parametrize("mode", MODES)
def test_without_autocast_in_the_config_it_is_refused_on_every_rank_and_training_goes_on(ranks2, mode):
    norms = ranks2.run(_refused_then_goes_on, mode)
    assert norms[0] == norms[1] == train_norm(ranks2, mode)


def _evaluated_after_a_refusal(refused):
    model = wrapped(NAME, config(1, dtype=None))
    if refused:
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(zeroamp.PrecisionError):
            loss_of(model, batch(NAME, 0))
    with torch.no_grad():
        loss_of(model, batch(NAME, 0))
    return [fqn for fqn, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]


def test_an_evaluation_after_a_refused_forward_releases_what_it_gathered(ranks2):
    assert ranks2.run(_evaluated_after_a_refusal, False)[0] == []
    assert ranks2.run(_evaluated_after_a_refusal, True)[0] == []


def train_norm(ranks2, mode):
    return ranks2.run(_first_norm, mode)[0]


def _first_norm(mode):
    model = wrapped(NAME, config(3, dtype=None, **MODES[mode]))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step.backward(loss_of(model, batch(NAME, 0)))
    return step.step().grad_norm


def _allowed():
    model = wrapped(NAME, config(3, dtype=None, zeroamp={"external_autocast": "allow"}))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return float(loss_of(model, batch(NAME, 0)).detach())


def test_it_can_be_allowed_and_then_does_what_autocast_does(ranks2):
    inside = ranks2.run(_allowed)[0]
    plain = ranks2.run(train, NAME, config(3, dtype=None), 1)[0].losses[0][0]
    by_config = ranks2.run(train, NAME, config(3), 1)[0].losses[0][0]
    assert inside == by_config != plain


def _by_another_method():
    model = wrapped(NAME, config(3, dtype=None))
    zeroamp.register_forward_method(model, "logits")
    model.logits(batch(NAME, 0))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(zeroamp.PrecisionError, match="fp32 precision"):
        model.logits(batch(NAME, 0))


def test_a_registered_method_is_checked_too(ranks2):
    ranks2.run(_by_another_method)

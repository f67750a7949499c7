"""A wrapped model inside of the caller's own autocast: the config's wins, or it is refused."""

from contextlib import nullcontext

import pytest
import torch
from torch.distributed.tensor import DTensor

import zeroamp
from tests.measuring.logs import log_lines
from tests.models.small import batch, build, loss_of
from tests.processes.training import config, wrapped

NAME = "two_blocks"  # its head is an fp32 leaf that autocast casts
NUM_STEPS = 2
OUTER = {
    "none": nullcontext,
    "same": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "other dtype": lambda: torch.autocast("cpu", dtype=torch.float16),
    "disabled": lambda: torch.autocast("cpu", enabled=False),
}
MODES = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "loss_scale": 128}}}
WARNED = {
    "other dtype": "torch.autocast('cpu', dtype=torch.float16)",
    "disabled": "torch.autocast('cpu', enabled=False)",
}
"""What the one warning of a model names."""
ALLOWED = {"dtype": None, "zeroamp": {"external_autocast": "allow"}}


def _losses(model, outer, *, evaluates=False, each=nullcontext, has_train_step=False):
    """Return the losses of some steps. The steps run inside `outer`, and each forward inside `each`."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    train = zeroamp.TrainStep(model, optimizer) if has_train_step else None
    with OUTER[outer]():
        for index in range(NUM_STEPS):
            if evaluates:
                with torch.no_grad(), each():
                    loss_of(model, batch(NAME, 9))
            with each():
                loss = loss_of(model, batch(NAME, index))
            losses.append(loss.item())
            if train is not None:
                train.backward(loss)
                train.step()
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _of_wrapped(cfg, outer, has_train_step):
    """Return the losses, and what is warned of forwards inside of another autocast."""
    model = wrapped(NAME, cfg)
    # "other dtype" is around forwards only: a backward inside of it would mix fp16 and bf16.
    around, each = ("none", OUTER[outer]) if outer == "other dtype" else (outer, nullcontext)
    with log_lines() as lines:
        losses = _losses(model, around, evaluates=True, each=each, has_train_step=has_train_step)
    return losses, [line for line in lines if "forward was called inside" in line]


@pytest.mark.parametrize(
    ("outer", "options", "has_train_step"),
    [
        ("none", {}, False),
        ("same", {}, False),
        ("same", {}, True),
        ("other dtype", {}, False),
        ("disabled", {}, False),
        ("same", ALLOWED, False),
    ],
    ids=["none", "same", "same, TrainStep", "other dtype", "disabled", "allowed"],
)
def test_the_configs_autocast_wins_and_weights_are_cast_again_after_each_update(ranks2, outer, options, has_train_step):
    # All ranks get the same batches, so that one process is the oracle.
    expected = _losses(build(NAME), "none", each=OUTER["same"])
    cfg = config(3, comm="fp32", **options)
    for rank, (losses, warnings) in enumerate(ranks2.run(_of_wrapped, cfg, outer, has_train_step)):
        assert losses == expected
        assert len(warnings) == (outer in WARNED and rank == 0)
        assert all(WARNED[outer] in text and "torch_autocast.dtype is bf16" in text for text in warnings)


def _first_norm(mode, inside_before):
    """Return the norm of a first step; `inside_before`: after a forward that an autocast around it refuses."""
    model = wrapped(NAME, config(3, dtype=None, **MODES[mode]))
    words = rf'dtype=torch.float16\), but the config sets {mode} .*"dtype": "fp16"\}} .*"external_autocast": "allow"'
    if inside_before:
        with OUTER["other dtype"](), pytest.raises(zeroamp.PrecisionError, match=words):
            loss_of(model, batch(NAME, 0))
        with OUTER["disabled"](), torch.no_grad():
            loss_of(model, batch(NAME, 0))
    step = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step.backward(loss_of(model, batch(NAME, 0)))
    return step.step().grad_norm


@pytest.mark.parametrize("mode", MODES)
def test_without_autocast_in_the_config_it_is_refused(ranks2, mode):
    """Without autocast in the config it is refused on every rank and training goes on."""
    assert ranks2.run(_first_norm, mode, True) == ranks2.run(_first_norm, mode, False)


def _evaluated_after_a_refusal():
    model = wrapped(NAME, config(1, dtype=None))
    with OUTER["same"](), pytest.raises(zeroamp.PrecisionError):
        loss_of(model, batch(NAME, 0))
    with torch.no_grad():
        loss_of(model, batch(NAME, 0))
    return [fqn for fqn, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]


def test_an_evaluation_after_a_refused_forward_releases_what_it_gathered(ranks2):
    assert ranks2.run(_evaluated_after_a_refusal)[0] == []

"""`zeroamp.skip_nonfinite_steps`: in every mode, a step whose gradient is not finite updates nothing."""

import math

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.measuring.logs import log_lines
from tests.models.small import batch, loss_of
from tests.processes.training import config, full_parameters, same_bits, wrapped
from tests.selection import slow_but

NAME = "llama_tied"
SKIP = {"zeroamp": {"skip_nonfinite_steps": True}}
MODES = {"autocast": {}, "fp32": {"dtype": None}, "bf16": {"dtype": None, "bf16": {"enabled": True}}}


def _trained(stage, options, bad_steps, num_steps):
    """Train; the loss of `bad_steps` is nan on the last rank only. Other steps get the batches of their order."""
    model = wrapped(NAME, config(stage, **options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    train = zeroamp.TrainStep(model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    skipped, index = [], 0
    for step in range(num_steps):
        is_bad = step in bad_steps
        factor = math.nan if is_bad and dist.get_rank() == dist.get_world_size() - 1 else 1.0
        train.backward(loss_of(model, batch(NAME, 2 * index + dist.get_rank())) * factor)
        report = train.step()
        skipped.append((report.skipped, report.num_skipped))
        index += not is_bad
    return skipped, train.num_steps, report.lr, full_parameters(model)


def _with_and_without_bad_steps(stage, options):
    return _trained(stage, options | SKIP, (0, 2), 5), _trained(stage, options, (), 3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", slow_but([0, 3], 3))
def test_skipped_steps_leave_no_trace(ranks2, stage, mode):
    for bad, good in ranks2.run(_with_and_without_bad_steps, stage, MODES[mode]):
        assert bad[0] == [(True, 1), (False, 1), (True, 2), (False, 2), (False, 2)]
        assert bad[1:3] == good[1:3], "steps taken, and the scheduler's learning rate"
        assert same_bits(bad[3], good[3]) == []


def test_by_default_nothing_is_skipped(ranks2):
    skipped, _, _, parameters = ranks2.run(_trained, 3, {}, (1,), 2)[0]
    assert skipped == [(False, 0)] * 2
    assert not parameters["embed.weight"].isfinite().all()


def _plain_backward():
    loss_of(model := wrapped(NAME, config(2, **SKIP)), batch(NAME, 0)).backward()
    return model


def test_a_plain_backward_that_would_skip_nothing_raises(ranks2):
    with pytest.raises(AssertionError, match="StepError: .*skip_nonfinite_steps True"):
        ranks2.run(_plain_backward)


def _logged(options, factor):
    model = wrapped(NAME, config(3, **options))
    train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    with log_lines() as lines:
        for index in range(3):
            train.backward(loss_of(model, batch(NAME, index)) * factor)
            _ = train.step().grad_norm
    return lines


def test_what_finds_such_a_value_is_named_once_but_not_in_float16(ranks2):
    (line,), others = ranks2.run(_logged, {}, math.nan)
    assert others == []
    assert line.startswith("The gradient norm of step 1 is nan. ")
    assert "DebugUnderflowOverflow(model) after wrap_model" in line
    fp16 = {"dtype": "float16", "fp16": {"initial_scale_power": 40}}
    assert ranks2.run(_logged, fp16, 1.0) == [[], []]

"""float16: the smallest loss scale, and the state of a loss scale. `test_parity` and `test_skipped_updates` train."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.processes.ranks import RankError
from tests.processes.training import SmallTraining, check_errors, config, errors_of

FIXED = {"fp16": {"loss_scale": 1024}}


def dynamic(stage, **fields):
    return config(stage, dtype="float16", clip=1.0, fp16={"initial_scale_power": 10, **fields})


def _overflow_twice(cfg):
    training = SmallTraining(cfg)
    for index in range(3):
        training.step(index, 1e30 if index > 0 and dist.get_rank() == 1 else 1.0)


def test_an_overflow_at_the_minimum_scale_is_an_error_on_all_ranks(ranks2):
    cfg = dynamic(3, hysteresis=1, min_loss_scale=512)
    text = r"StepError: .* loss scale 512, .*fp16.min_loss_scale 512.* after 1 optimizer steps.* norms .* Lower"
    with pytest.raises(RankError, match=text) as caught:
        ranks2.run(_overflow_twice, cfg)
    assert "--- rank 1" in str(caught.value)


def _resume():
    cfg = dynamic(2, hysteresis=2, loss_scale_window=3)

    def advance(training, marks):
        return [training.step(factor=1e30 if mark == "x" else 1.0).loss_scale for mark in marks]

    sgd = partial(torch.optim.SGD, lr=0.0)
    whole = advance(SmallTraining(cfg, sgd, name="conv"), ".x.xx....")
    training = SmallTraining(cfg, sgd, name="conv")
    first = advance(training, ".x.xx")
    saved = training.train.state_dict()
    training = SmallTraining(cfg, sgd, name="conv")
    training.train.load_state_dict(saved)
    return whole, first + advance(training, "...."), saved


def test_the_scale_and_its_counters_survive_a_state_dict(ranks2):
    whole, resumed, saved = ranks2.run(_resume)[0]
    assert resumed == whole
    assert len(set(whole)) > 2  # it moved down and up
    assert saved["num_steps"] == 2


def _load_others():
    """The errors of loading the state of another loss scale."""

    def load(cfg, saved_cfg):
        saved = SmallTraining(saved_cfg).train.state_dict()
        step = SmallTraining(cfg).train
        step.load_state_dict({key: value for key, value in saved.items() if key != "loss_scale"})
        step.load_state_dict(saved)

    fixed = config(3, dtype="float16", **FIXED)
    return errors_of(
        {
            "dynamic into fixed": lambda: load(fixed, dynamic(3)),
            "bf16 into dynamic": lambda: load(dynamic(3), config(3)),
            "another fixed one": lambda: load(fixed, config(3, dtype="float16", fp16={"loss_scale": 2})),
        }
    )


def test_the_state_of_another_loss_scale_is_refused(ranks2):
    texts = {
        "dynamic into fixed": "(?=.*a fixed scale at 1024)(?=.*a dynamic scale at 1024)",
        "bf16 into dynamic": "(?=.*a dynamic scale)(?=.*a switched-off scale at 1)",
        "another fixed one": "(?=.*a fixed scale at 1024)(?=.*a fixed scale at 2)",
    }
    start = r"^StepError: loss_scale in TrainStep\.load_state_dict"
    check_errors(ranks2.run(_load_others), {name: start + text for name, text in texts.items()})

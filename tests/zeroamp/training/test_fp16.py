"""float16: loss scaling, skipped steps, and agreement of the ranks."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.oracles import one_process
from tests.processes.ranks import RankError
from tests.processes.training import (
    SmallTraining,
    check_errors,
    check_run,
    config,
    errors_of,
    train,
)

NAME = "llama_tied"
FIXED = {"fp16": {"loss_scale": 1024}}


def _train_all_stages(cfg_options, num_steps):
    return {stage: train(NAME, config(stage, clip=0.5, **cfg_options), num_steps) for stage in (0, 1, 2, 3)}


@pytest.mark.parametrize("mode", ["autocast", "fp16"])
def test_all_stages_equal_one_process_with_the_same_scale(ranks2, mode):
    if mode == "autocast":
        options, oracle = {"dtype": "float16", **FIXED}, {"autocast": torch.float16}
    else:
        options = {"dtype": None, "fp16": {"enabled": True, "loss_scale": 1024}}
        oracle = {"autocast": None, "low_model": torch.float16}
    expected = one_process.train(NAME, world_size=2, num_steps=6, clip=0.5, loss_scale=1024.0, **oracle)
    for rank, by_stage in enumerate(ranks2.run(_train_all_stages, options, 6)):
        for run in by_stage.values():
            check_run(run, rank, expected)


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

    whole = advance(SmallTraining(cfg, _sgd), ".x.xx......")
    training = SmallTraining(cfg, _sgd)
    first = advance(training, ".x.xx")
    saved = training.train.state_dict()
    training = SmallTraining(cfg, _sgd)
    training.train.load_state_dict(saved)
    return whole, first + advance(training, "......"), saved


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.0)


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


def _overflow_in_a_window(stage, accumulate, bad):
    cfg = config(stage, dtype="float16", clip=1.0, accumulation=2, data_types={"grad_accum_dtype": accumulate})
    cfg["fp16"] = {"initial_scale_power": 10, "hysteresis": 1}
    training = SmallTraining(cfg)
    reports = []
    for window in range(2):
        for micro in range(2):
            is_bad = (window, micro, dist.get_rank()) == (0, 0, 1)
            report = training.step(micro, bad if is_bad else 1.0)
        reports.append((report.skipped, report.loss_scale))
    return reports


@pytest.mark.parametrize(
    ("stage", "accumulate", "bad"),
    [
        (0, "fp32", 1e30),
        (3, "fp16", math.nan),
    ],
)
def test_one_bad_micro_batch_of_one_rank_skips_the_window(ranks2, stage, accumulate, bad):
    for reports in ranks2.run(_overflow_in_a_window, stage, accumulate, bad):
        assert reports == [(True, 1024.0), (False, 512.0)]

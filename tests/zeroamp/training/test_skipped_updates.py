"""A step whose gradient is not finite updates nothing: in float16, and in every mode with `skip_nonfinite_steps`.

torch's fused optimizers skip on the device. Their bits are those of one process.
"""

import dataclasses
import logging
import math

import pytest
import torch
import torch.distributed as dist

from tests.measuring.logs import log_lines
from tests.oracles import one_process
from tests.processes.training import SmallTraining, adamw, check_runs, config, same_bits, train
from zeroamp.planning.mesh import local_part

NAME = "two_blocks"
BF16 = {"dtype": None, "bf16": {"enabled": True}}
SKIP = {"zeroamp": {"skip_nonfinite_steps": True}}


def _fused(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)


def _halving(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def _state(training):
    """Copies of all of this rank that an optimizer step changes."""
    names = {parameter: name for name, parameter in training.model.named_parameters()}
    state = {name: parameter.detach() for parameter, name in names.items()}
    for parameter, values in training.optimizer.state.items():
        state |= {f"{names[parameter]} {name}": value for name, value in values.items() if value is not None}
    state["scheduler"] = torch.tensor(training.scheduler.last_epoch)
    return {name: local_part(value).clone() for name, value in state.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skips:
    """What a training with bad steps did."""

    scales: list[float]
    skipped: list[tuple[bool, int]]
    """Of each step: whether it was skipped, and how many were so far."""
    changed: list[str]
    """What bad steps changed."""
    state: dict[str, torch.Tensor]
    """At the end."""
    counts: tuple[int, int]
    """Steps taken and skipped."""


def _trained(cfg, make_optimizer, bad_steps, num_steps, bad=math.nan):
    """Train; the first loss of `bad_steps` is `bad` on the last rank only. Others get the batches of their order."""
    training = SmallTraining(cfg, make_optimizer, _halving)
    scales, skipped, changed, index = [], [], [], 0
    for step in range(num_steps):
        is_bad = step in bad_steps
        before = _state(training) if is_bad else {}
        for micro in range(cfg["gradient_accumulation_steps"]):
            is_bad_loss = is_bad and micro == 0 and dist.get_rank() == dist.get_world_size() - 1
            report = training.step(index + micro, bad if is_bad_loss else 1.0)
        scales.append(report.loss_scale)
        skipped.append((report.skipped, report.num_skipped))
        if not is_bad:
            index += cfg["gradient_accumulation_steps"]
        else:
            changed += same_bits(_state(training), before)
            assert not math.isfinite(report.grad_norm)
    counts = training.train.num_steps, training.train.num_skipped
    assert training.train.state_dict()["num_skipped"] == counts[1]
    assert training.scheduler.last_epoch == training.train.num_steps
    return Skips(scales=scales, skipped=skipped, changed=changed, state=_state(training), counts=counts)


def _adamw_of_three_groups(parameters):
    return torch.optim.AdamW([{"params": parameters[at::3]} for at in range(3)], lr=1e-3)


def _fp16(stage=3, more=None, **fields):
    return config(stage, dtype="float16", clip=1.0, fp16={"initial_scale_power": 10, **fields}, **(more or {}))


IN_FP16 = {"accumulation": 2, "data_types": {"grad_accum_dtype": "fp16"}}
OVERFLOWS = {
    "stage 0": (_fp16(0, hysteresis=1), adamw, (1, 2), [1024, 1024, 512, 256]),
    "hysteresis of 2": (_fp16(), adamw, (1, 2), [1024, 1024, 1024, 512]),
    "growth": (_fp16(loss_scale_window=2), _adamw_of_three_groups, (), [1024, 1024, 1024, 2048, 2048, 4096]),
    "a fixed scale": (config(3, dtype="float16", fp16={"loss_scale": 256}), adamw, (1,), [256, 256, 256]),
    "fused": (_fp16(hysteresis=1), _fused, (0, 2, 3), [1024, 512, 512, 256, 128, 128]),
    "one of two micro-batches": (_fp16(0, {"accumulation": 2}, hysteresis=1), adamw, (0,), [1024, 512]),
    "nan of one of two, summed in fp16": (_fp16(3, IN_FP16, hysteresis=1), adamw, (0,), [1024, 512]),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_where_one_rank_overflows_all_ranks_change_nothing_but_the_scale(ranks2, name):
    cfg, make_optimizer, bad_steps, scales = OVERFLOWS[name]
    for run in ranks2.run(_trained, cfg, make_optimizer, bad_steps, len(scales), math.nan if "nan" in name else 1e30):
        assert run.scales == scales
        assert [is_skipped for is_skipped, _ in run.skipped] == [step in bad_steps for step in range(len(scales))]
        assert run.changed == []
        assert run.counts == (len(scales) - len(bad_steps), len(bad_steps))


@pytest.mark.parametrize(
    ("stage", "options", "skip"),
    [
        (3, {}, SKIP),
        (0, {"dtype": None}, SKIP),
        (3, BF16, SKIP),
        (2, BF16, {"bf16": {"enabled": True, "check_grad_overflow": True}}),
    ],
    ids=["autocast", "fp32", "bf16", "check_grad_overflow"],
)
def test_skipped_steps_leave_no_trace(ranks2, stage, options, skip):
    bad = ranks2.run(_trained, config(stage, **{**options, **skip}), adamw, (0, 2), 4)
    good = ranks2.run(_trained, config(stage, **options), adamw, (), 2)
    for run, expected in zip(bad, good, strict=True):
        assert run.skipped == [(True, 1), (False, 1), (True, 2), (False, 2)]
        assert run.counts == (2, 2)
        assert same_bits(run.state, expected.state) == []


def test_by_default_nothing_is_skipped(ranks2):
    for options in ({}, {"dtype": None, "bf16": {"enabled": True, "check_grad_overflow": False}}):
        run = ranks2.run(_trained, config(3, **options), adamw, (1,), 2)[0]
        assert run.skipped == [(False, 0)] * 2
        assert "embed.weight" in run.changed


def _train_fused(cfg, num_steps):
    return train(NAME, cfg, num_steps, make_optimizer=lambda named: _fused(list(named.values())))


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_the_bits_are_those_of_torchs_fused_optimizer_in_one_process(ranks2, clip):
    expected = one_process.train(
        NAME,
        world_size=2,
        num_steps=2,
        clip=clip,
        loss_scale=1024.0,
        autocast=torch.float16,
        make_optimizers=lambda named: [_fused(named.values())],
    )
    cfg = config(3, clip=clip, dtype="float16", fp16={"loss_scale": 1024})
    check_runs(ranks2.run(_train_fused, cfg, 2), expected)


def _after_clip():
    """`clip_grad_norm` and `update` in two calls: the host knows in between."""
    training = SmallTraining(_fp16(hysteresis=1), _fused)
    for index in range(3):
        training.backward(index, math.inf if index == 2 else 1.0)
        norm = training.train.clip_grad_norm()
        scale = training.train.loss_scale
        report = training.train.update()
    return float(norm), scale, report.skipped


def test_between_clip_grad_norm_and_update_the_host_knows_of_an_overflow(ranks2):
    for norm, scale, skipped in ranks2.run(_after_clip):
        assert (scale, skipped) == (512.0, True)
        assert not math.isfinite(norm)


def _printed():
    training = SmallTraining(config(3, steps_per_print=2, **SKIP))
    with log_lines(logging.INFO) as lines:
        for index in range(3):
            training.step(index, math.nan)
    return [line.rpartition(", ")[2] for line in lines if line.startswith("step ")]


def test_skipped_steps_count_for_steps_per_print(ranks2):
    assert ranks2.run(_printed) == [["skipped (2 so far)"], []]

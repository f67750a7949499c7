"""A reproducible run goes on with its bits at another number of ranks and another stage, or says why not."""

import logging
from functools import partial

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.processes import reproducible
from tests.processes.ranks import Ranks
from tests.processes.training import config, full_parameters, mesh_of, same_bits
from zeroamp.reproducible.resume import broken_bits

NUM_MICRO_BATCHES = 4


def _cfg(stage, num_ranks, **zeroamp_keys):
    cfg = config(stage, clip=0.5, comm="fp32" if stage == 1 else None)
    cfg["gradient_accumulation_steps"] = NUM_MICRO_BATCHES // num_ranks
    return {**cfg, "zeroamp": {"reproducible": True, "seed": 3, **zeroamp_keys}}


def _train(folder, stage, until, *, mesh_shape=None):
    """Go on from the last checkpoint, if there is one, up to step `until`, and save; return norms and parameters."""
    policy = zeroamp.policy_from_config(_cfg(stage, dist.get_world_size()))
    torch.manual_seed(17 * dist.get_rank())
    model = zeroamp.wrap_model(reproducible.build_model("dropout"), policy, mesh_of(mesh_shape)).train()
    optimizer = reproducible.adamw(model)
    train = zeroamp.TrainStep(model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=9))
    zeroamp.load_checkpoint(folder, model, train, missing_ok=True)
    data = list(range(37))  # 4 steps of an epoch, and one sample that is left over
    sampler = zeroamp.MicroBatchSampler(train, data, micro_batch_size=2, seed=1)
    norms = []
    while train.num_steps < until:
        for samples in sampler:
            inputs = torch.cat([reproducible.inputs_of("dropout", 0, sample, 1) for sample in samples])
            train.backward(reproducible.loss("dropout", model, inputs))
            report = train.step()
            if report is not None:
                norms.append((report.step, report.loss, report.grad_norm))
            if train.num_steps == until:
                break
    zeroamp.save_checkpoint(folder, model, train, step=until)
    return norms, full_parameters(model)


def test_a_run_on_4_2_and_1_ranks_and_other_stages_is_the_run_that_was_never_stopped(tmp_path, ranks2, ranks4):
    alone = Ranks(1)
    try:
        (whole,) = alone.run(_train, tmp_path / "whole", 3, 11)
        parts = [*ranks4.run(_train, tmp_path / "parts", 2, 3, mesh_shape=(2, 2))[0][0]]
        parts += ranks2.run(_train, tmp_path / "parts", 3, 6)[0][0]
        parts += ranks2.run(_train, tmp_path / "parts", 1, 8)[0][0]
        (last,) = alone.run(_train, tmp_path / "parts", 0, 11)
    finally:
        alone.stop()
    assert parts + last[0] == whole[0]
    assert same_bits(last[1], whole[1]) == []


CHANGES = [
    ({"reproducible": False, "seed": None}, 2, "zeroamp.reproducible is false here"),
    ({"seed": 4}, 2, "zeroamp.seed was 3, and is 4 here"),
    ({}, 4, "an optimizer step had 4 micro-batches on all ranks, and has 8 here"),
    ({"reduce": "sum"}, 2, 'zeroamp.reduce was "mean", and is "sum" here'),
    ({}, 2, None),
]


@pytest.mark.parametrize(("keys", "num_ranks", "expected"), CHANGES, ids=[str(why) for *_, why in CHANGES])
def test_a_resume_that_would_break_the_bits_says_why(keys, num_ranks, expected):
    saved = zeroamp.policy_from_config(_cfg(3, 2)).to_config()
    saved["zeroamp"]["of_an_earlier_version"] = True
    cfg = _cfg(2, 2, **keys)
    cfg["zeroamp"] = {key: value for key, value in cfg["zeroamp"].items() if value is not None}
    assert broken_bits(saved, 2, zeroamp.policy_from_config(cfg), num_ranks) == expected
    assert broken_bits({}, 2, zeroamp.policy_from_config(cfg), num_ranks) is None


def _load_with_another_seed(folder):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("zeroamp").addHandler(handler)
    try:
        policy = zeroamp.policy_from_config(_cfg(3, dist.get_world_size(), seed=4))
        model = zeroamp.wrap_model(reproducible.build_model("dropout"), policy)
        optimizer = reproducible.adamw(model)
        train = zeroamp.TrainStep(model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=9))
        zeroamp.load_checkpoint(folder, model, train)
    finally:
        logging.getLogger("zeroamp").removeHandler(handler)
    return [text for text in records if "reproducible" in text]


def test_the_first_rank_logs_the_reason_once(tmp_path, ranks2):
    ranks2.run(_train, tmp_path, 3, 1)
    first, second = ranks2.run(partial(_load_with_another_seed, tmp_path))
    assert second == []
    (text,) = first
    assert text.endswith("This run continues with other bits: zeroamp.seed was 3, and is 4 here.")

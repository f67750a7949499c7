"""A reproducible run goes on with its bits at another number of ranks and another stage."""

import torch
import torch.distributed as dist

import zeroamp
from tests.processes import reproducible
from tests.processes.training import config, full_parameters, same_bits

NUM_MICRO_BATCHES = 4


def _cfg(stage, num_ranks, **zeroamp_keys):
    cfg = config(stage, clip=0.5)
    cfg["gradient_accumulation_steps"] = NUM_MICRO_BATCHES // num_ranks
    return {**cfg, "zeroamp": {"reproducible": True, "seed": 3, **zeroamp_keys}}


def _train(folder, stage, until):
    """Go on from the last checkpoint, if there is one, up to step `until`, and save; return norms and parameters."""
    policy = zeroamp.policy_from_config(_cfg(stage, dist.get_world_size()))
    torch.manual_seed(17 * dist.get_rank())
    model = zeroamp.wrap_model(reproducible.build_model("dropout"), policy).train()
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


def test_other_ranks_and_stages_go_on_bit_for_bit(tmp_path, ranks1, ranks2, ranks4):
    """A run on 4, 2 and 1 ranks and other stages is one that was never stopped."""
    (whole,) = ranks1.run(_train, tmp_path / "whole", 3, 11)
    parts = [*ranks4.run(_train, tmp_path / "parts", 2, 3)[0][0]]
    parts += ranks2.run(_train, tmp_path / "parts", 3, 6)[0][0]
    parts += ranks2.run(_train, tmp_path / "parts", 2, 8)[0][0]
    (last,) = ranks1.run(_train, tmp_path / "parts", 3, 11)
    assert parts + last[0] == whole[0]
    assert same_bits(last[1], whole[1]) == []

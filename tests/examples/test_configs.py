"""Every ready-to-use config is loaded and reported, and one of each kind trains a small model."""

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.processes.launch import ROOT
from tests.selection import slow_but

CONFIGS = sorted((ROOT / "examples" / "configs").glob("*.json"))
NAME = "llama_tied"


def test_the_promised_files_are_there():
    modes = ("autocast_bf16", "autocast_fp16", "bf16", "fp16")
    names = {f"zero{stage}_{mode}" for stage in range(4) for mode in modes}
    names |= {"hsdp_autocast_bf16", "offload_autocast_bf16", "accumulation_autocast_bf16", "reproducible_autocast_bf16"}
    assert {path.stem for path in CONFIGS} == names


def _losses(path):
    policy = zeroamp.policy_from_config(path)
    model = zeroamp.wrap_model(build(NAME), policy)
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    while len(losses) < 4:
        step.backward(loss_of(model, batch(NAME, dist.get_rank())))  # one batch per rank, over and over
        if (report := step.step()) is not None:
            losses += [] if report.skipped else [report.loss]
            assert step.num_skipped <= (4 if policy.low_dtype == torch.float16 else 0)  # the scale starts at 2**16
    return losses, policy.gradient_accumulation_steps


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_of_it_has_an_effect(path):
    assert "Without effect" not in zeroamp.policy_from_config(path, world_size=2).report()


STEPPED = (
    "zero0_fp16", "zero1_bf16", "zero2_autocast_fp16", "zero3_autocast_bf16", "hsdp_autocast_bf16",
    "offload_autocast_bf16", "accumulation_autocast_bf16", "reproducible_autocast_bf16",
)  # fmt: skip
"""Each stage and each mode once."""


@pytest.mark.parametrize("name", slow_but(STEPPED, "zero1_bf16", "zero3_autocast_bf16", "accumulation_autocast_bf16"))
def test_a_small_model_learns_with_it(ranks2, name):
    path = ROOT / "examples" / "configs" / f"{name}.json"
    losses, num_micro_batches = ranks2.run(_losses, path)[0]
    assert losses[-1] < losses[0] - 0.1, losses
    assert (num_micro_batches > 1) == name.startswith(("accumulation", "reproducible"))

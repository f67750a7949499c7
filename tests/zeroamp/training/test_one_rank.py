"""One rank, on the CPU and on a GPU where there is one: the same path, the same oracle."""

import pytest
import torch

from tests.oracles import one_process
from tests.processes.ranks import Ranks
from tests.processes.training import check_run, config, train

NAME = "llama_tied"
NUM_STEPS = 5
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=needs_gpu)])
def rank(request):
    ranks = Ranks(1, request.param)
    yield ranks
    ranks.stop()


def _all_stages(options):
    return {stage: train(NAME, config(stage, clip=0.5, **options), NUM_STEPS) for stage in (0, 1, 2, 3)}


def _in_a_process(oracle):
    return one_process.train(NAME, world_size=1, num_steps=NUM_STEPS, clip=0.5, **oracle)


@pytest.mark.parametrize(
    ("options", "oracle"),
    [
        ({}, {}),
        ({"dtype": "float16", "fp16": {"loss_scale": 1024}}, {"autocast": torch.float16, "loss_scale": 1024.0}),
        ({"dtype": None, "bf16": {"enabled": True}}, {"low_model": torch.bfloat16}),
    ],
    ids=["autocast bf16", "autocast fp16", "bf16"],
)
def test_one_rank_at_every_stage_is_plain_torch(rank, options, oracle):
    expected = rank.run(_in_a_process, {**oracle, "device": rank.device})[0]
    for run in rank.run(_all_stages, options)[0].values():
        if rank.device == "cpu":
            check_run(run, 0, expected)
        else:
            # GPU kernels choose their algorithm by the storage's alignment, so the last bits may differ, and 16-bit
            # arithmetic carries them on.
            losses = torch.tensor([ranks[0] for ranks in expected[0]])
            torch.testing.assert_close(torch.tensor(run.losses), losses, rtol=2e-3, atol=0)
            torch.testing.assert_close(torch.tensor(run.norms), torch.tensor(expected[1]), rtol=2e-2, atol=0)

"""`zeroamp.param_gather_dtype`: weights of Linears that are all-gathered in float8."""

import pytest
import torch

from tests.oracles import one_process
from tests.oracles.float8_weights import round_linears
from tests.processes.training import config, train

pytest.importorskip("torchao", reason="float8 all-gathers are torchao's")

FLOAT8 = {"param_gather_dtype": "float8_e4m3fn"}
BF16 = {"dtype": None, "bf16": {"enabled": True}}


def float8(stage=3, *, zeroamp=None, **options):
    return config(stage, zeroamp={**FLOAT8, **(zeroamp or {})}, **options)


def same(parameters, expected):
    return {fqn: torch.equal(value, expected[fqn]) for fqn, value in parameters.items()}


@pytest.mark.parametrize("mode", ["autocast", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_bits_are_those_of_one_process_that_rounds_its_weights(ranks2, stage, mode):
    comm = "fp32" if stage == 1 else None  # else sums of micro-batches would be rounded to bf16
    cfg = float8(stage, accumulation=2, clip=0.5, comm=comm, **(BF16 if mode == "bf16" else {}))
    runs = ranks2.run(train, "llama_untied", cfg, 3)
    losses, _norms, expected = one_process.train(
        "llama_untied",
        world_size=2,
        num_steps=3,
        accumulation=2,
        clip=0.5,
        low_model=torch.bfloat16 if mode == "bf16" else None,
        reduce_each=stage > 1,
        prepare=round_linears,
    )
    for rank, run in enumerate(runs):
        assert run.losses == [step[rank] for step in losses]
        assert all(same(run.parameters, expected).values())

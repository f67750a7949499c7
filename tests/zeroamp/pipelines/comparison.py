"""Compares a pipeline with one process: the configs, what one process computes, and how much may differ."""

import pytest
import torch

from tests.models import pipelines as models
from tests.oracles import pipelines as oracle
from tests.processes import pipelines

STEPS, LR = 2, 0.3
DATA = {"pp": 2, "dp": 2}
MODES = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 10}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
BOUND = {"fp32": 1e-6, "bf16": 0.0, "fp16": 0.0, "autocast": 1e-6}
"""In low precision the micro-batches have the oracle's gradients and order, and 2 data ranks add two numbers. In fp32 a
gradient of a zero bubble schedule's weight may come from another kernel, and autocast runs LayerNorm in fp32. Norms are
summed in another order in fp64 and rounded to fp32, and clipping takes that bit to the weights: 1e-6 and 1e-8."""


def needs(schedule):
    """Skip the running test where torch cannot run the schedule on CPUs.

    In torch 2.11, a rank sends what goes from one of its parts to another to itself, which gloo cannot.
    """
    if schedule in pipelines.OF_A_V and torch.__version__ < (2, 13):
        pytest.skip(f"{schedule} of this torch sends from a rank to itself, which gloo cannot")


def config(stage, mode, **more):
    zero = {"stage": stage, "stage3_param_persistence_threshold": more.pop("threshold", 0)}
    return {"zero_optimization": zero, **MODES[mode], **more}


def expected(name, mode, *, num_data=2, tied=False, loss_scale=1.0, accumulate=torch.float32):
    model = models.decoder(tied=tied)
    number = pipelines.num_micro_batches(name)
    return oracle.train(
        model,
        lambda step, rank: models.samples(step, rank, pipelines.MICRO_BATCH * number),
        models.loss_of,
        num_steps=STEPS,
        num_data=num_data,
        num_micro_batches=number,
        mode=mode,
        max_norm=1.0,
        lr=LR,
        loss_scale=loss_scale,
        accumulate=accumulate,
    )


def check(runs, wanted, num_data, bound):
    losses = [run for run in runs if run.losses[0]]
    assert len(losses) == num_data  # the last stage's ranks, in the order of their data ranks
    for step, of_ranks in enumerate(wanted.losses):
        assert [run.losses[step] for run in losses] == [pytest.approx(each, rel=bound, abs=0) for each in of_ranks]
    for run in runs:
        assert run.norms == pytest.approx(wanted.norms, rel=1e-6)
        assert run.norms == runs[0].norms
        for fqn, value in run.parameters.items():
            of_whole = wanted.parameters.get(fqn, wanted.parameters["embed.weight"])  # of a tied head
            difference = torch.linalg.vector_norm(value - of_whole) / torch.linalg.vector_norm(of_whole)
            assert difference <= 10 * max(bound, 1e-9), fqn

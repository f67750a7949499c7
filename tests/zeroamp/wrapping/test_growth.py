"""Wrapping and stepping take work in proportion to the number of blocks: counted, not timed."""

import pytest
import torch

import zeroamp
from benchmarks.fake_ranks import fake_ranks
from tests.measuring.counted import counted, outgrown
from tests.models.small import Llama
from tests.processes.training import config
from tests.selection import slow_but
from zeroamp.planning.mesh import Ranks
from zeroamp.wrapping.state import wrap_state
from zeroamp.wrapping.summary import size_summary

FEW, TIMES = 4, 10

OPTIONS = {
    "stage 1 with accumulation": {"stage": 1, "accumulation": 2, "clip": 1.0},
    "stage 3": {"clip": 1.0},
    "prefetch and live parameters of a group more in every unit": {
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 30_000,
            "stage3_max_live_parameters": 10**12,
        },
    },
    "modules kept in fp32": {
        "dtype": None,
        "bf16": {"enabled": True},
        "data_types": {"keep_in_fp32_modules": ["RMSNorm", "down.bias"]},
    },
}
STEPPED = ["stage 1 with accumulation", "stage 3"]
TOKENS = torch.zeros(1, 4, dtype=torch.long)


@pytest.fixture(scope="module", autouse=True)
def _ranks():
    with fake_ranks(4):
        _work_of_steps(2, "stage 3")  # what only the first model of a process does is not counted
        yield


def _wrap(num_blocks, name):
    cfg = config(**OPTIONS[name])
    return zeroamp.wrap_model(Llama(tied=False, num_blocks=num_blocks), zeroamp.policy_from_config(cfg))


def _work_of_wrapping(num_blocks, name):
    with counted() as work:
        plan = wrap_state(_wrap(num_blocks, name)).plan
        size_summary(plan, Ranks(num_shards=4), name="model", seconds=0.0)
    return work


def _work_of_steps(num_blocks, name):
    """Return that of making a `TrainStep`, and that of its second step."""
    model = _wrap(num_blocks, name)
    optimizer = torch.optim.AdamW(model.parameters())
    with counted() as making:
        train = zeroamp.TrainStep(model, optimizer)
    for _ in range(2):
        with counted() as stepping:
            report = None
            while report is None:
                train.backward(model(TOKENS))
                report = train.step()
    return making, stepping


@pytest.mark.parametrize("name", slow_but(OPTIONS, "stage 3"))
def test_wrapping_more_blocks_makes_no_function_work_more_than_in_proportion(name):
    few, many = (_work_of_wrapping(num_blocks, name) for num_blocks in (FEW, TIMES * FEW))
    assert outgrown(few, many, TIMES) == {}
    assert 2 < many.total() / few.total() <= TIMES  # and what grows was counted


@pytest.mark.parametrize("name", slow_but(STEPPED, "stage 3"))
def test_so_does_a_step(name):
    few, many = (_work_of_steps(num_blocks, name) for num_blocks in (FEW, TIMES * FEW))
    for before, after in zip(few, many, strict=True):
        assert outgrown(before, after, TIMES) == {}
        assert 2 < after.total() / before.total() <= TIMES

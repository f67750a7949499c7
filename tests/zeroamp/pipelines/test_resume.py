"""A checkpoint of the parts, saved as docs/pipelines.md says, resumes on other numbers of stages and data ranks."""

import re

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import zeroamp
from tests.measuring.sources import ROOT
from tests.models import pipelines as models
from tests.processes.parallel_training import data_rank, mesh_of

MICRO_BATCHES = 8
"""Of all data ranks in a step."""
CONFIG = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 3}}


def _of_the_page():
    blocks = re.findall(r"```python[^\n]*\n(.*?)```", (ROOT / "docs" / "pipelines.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "def save" in block]
    names = {}
    exec(code, names)
    return names["save"], names["load"]


def _train(axes, first, count, folder, *, loads=False, saves=False):
    """Return the mean loss of each step, and each norm."""
    save, load = _of_the_page()
    mesh = mesh_of(**axes)
    data, stages, number = mesh["dp"], mesh["pp"], axes["pp"]
    policy = zeroamp.policy_from_config(CONFIG, world_size=data.size())
    index = stages.get_local_rank()
    part = zeroamp.wrap_model(models.part(index, number), policy, data, auto_wrap_policy={"Block"})
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
    if loads:
        load([part], [optimizer], folder)
    stage = PipelineStage(part, index, number, torch.device("cpu"), group=stages.get_group())
    own = MICRO_BATCHES // data.size()
    schedule = ScheduleGPipe(stage, own, loss_fn=models.loss_of)
    seen = []
    for step in range(first, first + count):
        inputs, target = (each.chunk(data.size())[data_rank(mesh)] for each in models.samples(step, 0, 16))
        losses = []
        schedule.step(
            *([inputs] if stage.is_first else []), **({"target": target, "losses": losses} if stage.is_last else {})
        )
        norm = zeroamp.clip_grad_norm_(part, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        torch.distributed.all_reduce(loss)
        seen.append((loss.item() / data.size(), norm.item()))
    if saves:
        save([part], [optimizer], folder)
    return seen


@pytest.fixture(scope="module")
def unbroken(ranks4, tmp_path_factory):
    """What each step saw, and a checkpoint after the second."""
    folder, axes = str(tmp_path_factory.mktemp("pipeline") / "checkpoint"), {"pp": 2, "dp": 2}
    ranks4.run(_train, axes, 0, 2, folder, saves=True)
    return ranks4.run(_train, axes, 0, 4, folder)[0], folder


@pytest.mark.parametrize("axes", [{"pp": 2, "dp": 2}, {"pp": 1, "dp": 4}, {"pp": 4, "dp": 1}])
def test_it_resumes_on_other_axes(ranks4, unbroken, axes):
    (*_, third, fourth), folder = unbroken
    for found in ranks4.run(_train, axes, 2, 2, folder, loads=True):
        assert found == [pytest.approx(each, rel=0 if axes["pp"] == 2 else 1e-6) for each in (third, fourth)]

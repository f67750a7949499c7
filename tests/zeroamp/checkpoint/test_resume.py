"""Training goes on bit for bit: losses, norms, scales, parameters, buffers, optimizer and random states."""

from contextlib import nullcontext

import pytest
import torch

from tests.processes.checkpoint_training import Case, resume
from tests.selection import slow_but

DYNAMIC = {"dtype": "float16", "fp16": {"initial_scale_power": 12, "loss_scale_window": 2, "hysteresis": 2}}


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 3))
def test_five_steps_and_five_resumed_ones_are_ten(ranks2, tmp_path, stage):
    options = {"accumulation": 2, "clip": 0.5, **DYNAMIC}
    case = Case(stage=stage, scheduler="cosine", options=options, overflow_at=(3, 6, 8), steps=(5, 5))
    for resumed in ranks2.run(resume, str(tmp_path), case, uninterrupted=True):
        assert resumed.differing == []
        scales = [entry[2] for entry in resumed.log]
        skipped = [index for index, entry in enumerate(resumed.log) if entry[3]]
        assert skipped == [3, 6, 8]
        assert len(set(scales[:5])) > 1  # it moved before the save, and after it
        assert len(set(scales[5:])) > 1
        assert all(entry[1] > 0.5 for index, entry in enumerate(resumed.log[:3]))  # so that clipping acts


def zero(stage=3, **options):
    return {"zero_optimization": {"stage": stage, **options}}


CPU = {"device": "cpu"}
WAYS = {
    "sequential": Case(scheduler="sequential", async_=True),
    "tensor lr with a scheduler": Case(optimizer="tensor lr", scheduler="cosine"),
    "offload": Case(options=zero(offload_param=CPU, offload_optimizer=CPU), async_=True),
    "live": Case(options=zero(stage3_max_live_parameters=10**6), async_=True),
    "evaluation": Case(stage=2, evaluate_in=torch.no_grad, async_=True),
    "evaluation with gradients": Case(stage=2, evaluate_in=nullcontext),  # parameters stay gathered after it
    "fp16 mode": Case(options={"dtype": None, "fp16": {"enabled": True, "loss_scale": 64}}),
    "one rank in the background": Case(group_size=1, async_=True),
}


@pytest.mark.parametrize("way", slow_but(WAYS, "offload", "one rank in the background"))
def test_every_way_to_train_goes_on(ranks2, tmp_path, way):
    for resumed in ranks2.run(resume, str(tmp_path), WAYS[way]):
        assert resumed.differing == []


def test_shards_and_replicas_go_on(ranks4, tmp_path):
    for resumed in ranks4.run(resume, str(tmp_path), Case(mesh_shape=(2, 2), async_=True)):
        assert resumed.differing == []

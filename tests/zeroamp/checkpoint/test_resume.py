"""Training goes on bit for bit: losses, norms, scales, parameters, buffers, optimizer and random states."""

from contextlib import nullcontext

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR

import zeroamp
from tests.processes.checkpoint_training import Case, Training, full, resume
from tests.selection import slow_but

DYNAMIC = {"dtype": "float16", "fp16": {"initial_scale_power": 12, "loss_scale_window": 3, "hysteresis": 2}}


@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 3))
def test_ten_steps_and_ten_resumed_ones_are_twenty(ranks2, tmp_path, stage):
    options = {"accumulation": 2, "clip": 0.5, **DYNAMIC}
    case = Case(stage=stage, scheduler="cosine", options=options, overflow_at=(3, 7, 8, 12, 14), steps=(10, 10))
    for resumed in ranks2.run(resume, str(tmp_path), case, uninterrupted=True):
        assert resumed.differing == []
        scales = [entry[2] for entry in resumed.log]
        skipped = [index for index, entry in enumerate(resumed.log) if entry[3]]
        assert skipped == [3, 7, 8, 12, 14]
        assert len(set(scales[:10])) > 1  # it moved before the save, and after it
        assert len(set(scales[10:])) > 1
        assert all(entry[1] > 0.5 for index, entry in enumerate(resumed.log[:3]))  # so that clipping acts


def zero(stage=3, **options):
    return {"zero_optimization": {"stage": stage, **options}}


CPU = {"device": "cpu"}
WAYS = {
    "lambda": Case(scheduler="lambda"),
    "sequential": Case(scheduler="sequential", async_=True),
    "tensor lr with a scheduler": Case(optimizer="tensor lr", scheduler="cosine"),
    "offload": Case(options=zero(offload_param=CPU, offload_optimizer=CPU), async_=True),
    "live": Case(options=zero(stage3_max_live_parameters=10**6), async_=True),
    "evaluation": Case(stage=2, evaluate_in=torch.no_grad, async_=True),
    "evaluation with gradients 1": Case(stage=1, evaluate_in=nullcontext, async_=True),
    "evaluation with gradients 2": Case(stage=2, evaluate_in=nullcontext),  # parameters stay gathered after it
    "no autocast": Case(options={"dtype": None}),
    "fp16 mode": Case(options={"dtype": None, "fp16": {"enabled": True, "loss_scale": 64}}),
    "one rank": Case(group_size=1),
    "one rank in the background": Case(group_size=1, async_=True),
}


@pytest.mark.parametrize("way", slow_but(WAYS, "offload", "one rank in the background"))
def test_every_way_to_train_goes_on(ranks2, tmp_path, way):
    for resumed in ranks2.run(resume, str(tmp_path), WAYS[way]):
        assert resumed.differing == []


def test_shards_and_replicas_go_on(ranks4, tmp_path):
    for resumed in ranks4.run(resume, str(tmp_path), Case(mesh_shape=(2, 2), async_=True)):
        assert resumed.differing == []


class Several(Training):
    """A `Training` whose parameters are in two optimizers, the first of them with a scheduler."""

    def __init__(self, case, seed=0):
        super().__init__(case, seed)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer, self.other = (
            torch.optim.SGD(parameters[:4], lr=1e-1, momentum=0.9),
            torch.optim.AdamW(parameters[4:], lr=1e-2),
        )
        self.scheduler = LinearLR(self.optimizer, 0.5, 1.0, 5)
        self.train = zeroamp.TrainStep(self.model, [self.optimizer, self.other], [self.scheduler, None])

    def state(self):
        tensors, values = super().state()
        names = {id(p): name for name, p in self.model.named_parameters()}
        for parameter, entries in self.other.state.items():
            tensors |= {f"{names[id(parameter)]}.{key}": full(value) for key, value in entries.items()}
        assert {"embed.weight.momentum_buffer", "blocks.1.up.weight.exp_avg_sq"} < tensors.keys()
        return tensors, values


def _several(folder):
    return resume(folder, Case(async_=True), training=Several)


def test_several_optimizers_and_a_scheduler_of_one_go_on(ranks2, tmp_path):
    for resumed in ranks2.run(_several, str(tmp_path)):
        assert resumed.differing == []

"""The gradient after sixteen micro-batches, in every mode, dtype and stage, and its error against fp64."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import zeroamp
from tests.models.small import batch, build, loss_of
from tests.processes.training import config, wrapped
from zeroamp.policies.accumulation import ACCUMULATE, STAGES
from zeroamp.policies.conflicts import refusal
from zeroamp.policies.dtypes import short_name

NAME = "llama_untied"
MICRO_BATCHES = 16
SCALE = 1024.0


def cell(mode, low_dtype, accumulate, stage):
    cfg = config(stage, dtype=None, accumulation=MICRO_BATCHES, data_types={"grad_accum_dtype": short_name(accumulate)})
    if mode == "autocast":
        cfg["torch_autocast"] = {"enabled": True, "dtype": short_name(low_dtype)}
    elif mode != "fp32":
        cfg[mode] = {"enabled": True}
    if low_dtype == torch.float16:
        cfg["fp16"] = {"loss_scale": SCALE, "enabled": mode == "fp16"}
    return cfg


class Recorder(torch.optim.SGD):
    """Keeps the gradients it is given."""

    def step(self, closure=None):
        self.gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in self._all()]

    def _all(self):
        return [p for group in self.param_groups for p in group["params"]]


def _accumulated(cfg):
    model = wrapped(NAME, cfg)
    recorder = Recorder(model.parameters(), lr=0.0)
    step = zeroamp.TrainStep(model, recorder)
    for micro in range(MICRO_BATCHES):
        step.backward(loss_of(model, batch(NAME, 2 * micro + dist.get_rank())))
        step.step()
    return torch.cat([gradient.flatten() for gradient in recorder.gradients])


def _raw_gradients(mode, low_dtype):
    """[micro][rank] -> the raw gradient of one micro-batch in its own dtype, as fp64, unscaled."""
    model = build(NAME)
    scale = SCALE if low_dtype == torch.float16 else 1.0
    rows = []
    for micro in range(MICRO_BATCHES):
        row = []
        for rank in range(2):
            inputs = batch(NAME, 2 * micro + rank)
            if mode in ("bf16", "fp16"):
                leaves = {fqn: p.detach().to(low_dtype).requires_grad_() for fqn, p in model.named_parameters()}
                loss = torch.func.functional_call(model, leaves, (inputs,))
            else:
                leaves = dict(model.named_parameters())
                with torch.autocast("cpu", dtype=low_dtype or torch.bfloat16, enabled=low_dtype is not None):
                    loss = loss_of(model, inputs)
            gradients = torch.autograd.grad(loss.float() / MICRO_BATCHES * scale, list(leaves.values()))
            row.append(torch.cat([gradient.double().flatten() for gradient in gradients]) / scale)
        rows.append(row)
    return rows


def relative_errors(mode, low_dtype, runs):
    exact = sum(sum(row) for row in _raw_gradients(mode, low_dtype)) / 2
    return {key: float((gradient.double() - exact).norm() / exact.norm()) for key, gradient in runs.items()}


def all_cells(mode, low_dtype):
    return {
        (accumulate, stage): _accumulated(cell(mode, low_dtype, accumulate, stage))
        for accumulate in ACCUMULATE
        for stage in STAGES
        if refusal(low_dtype, accumulate) is None
    }

"""Evaluations in `torch.inference_mode()`, the first forward of all included, change nothing in training."""

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.models.small import batch, loss_of
from tests.processes.training import config, full_parameters, same_bits, wrapped
from tests.selection import slow_but

NAME = "llama_tied"


def _trained(cfg, evaluates, mesh_shape=None):
    model = wrapped(NAME, cfg, mesh_shape=mesh_shape)
    zeroamp.register_forward_method(model, "logits")
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    calls, losses = [], []
    for step in range(3):
        before = dict(zeroamp.traffic(model).calls)
        if evaluates:
            with torch.inference_mode():
                evaluate = model.logits if step == 0 else model
                losses.append(evaluate(batch(NAME, 5)).float().mean().item())
            calls.append({key: n - before.get(key, 0) for key, n in zeroamp.traffic(model).calls.items()})
        train.backward(loss_of(model, batch(NAME, 2 * step + dist.get_rank())))
        train.step()
    return losses, calls, full_parameters(model)


CONFIGS = {
    "stage 0": (config(0), None),
    "stage 1 bf16": (config(1, dtype=None, bf16={"enabled": True}), None),
    "stage 2": (config(2), None),
    "stage 3": (config(3), None),
    "stage 3 fp32": (config(3, dtype=None), None),
    "replicas": (config(3), (2, 1)),
}


@pytest.mark.parametrize("name", slow_but(CONFIGS, "stage 0", "stage 3", "replicas"))
def test_training_is_the_same_with_evaluations_in_inference_mode(ranks2, name):
    cfg, mesh_shape = CONFIGS[name]
    of_ranks = zip(*(ranks2.run(_trained, cfg, flag, mesh_shape) for flag in (True, False)), strict=True)
    for (losses, calls, ours), (_, _, plain) in of_ranks:
        assert same_bits(ours, plain) == []
        assert all(loss == loss for loss in losses)
        assert calls[1] == calls[2], "only the first evaluation unshards ahead"

"""What every rank runs of a mixture of experts: a short training, and the experts that its routers chose."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

import zeroamp
from tests.models.adapters import quietly
from tests.models.experts import EXPERTS
from tests.models.families import NUM_RANKS, loss_of
from tests.processes.training import full_parameters

NUM_STEPS = 2
LR = 1e-2


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one rank saw."""

    losses: list[float]
    """[step]."""
    parameters: dict[str, torch.Tensor]
    """FQN -> the full parameter at the end of the training."""
    without_gradient: list[str]
    """FQNs of the parameters whose `grad` was None before the first update."""
    low: set[str]
    """FQNs of the parameters that are all-gathered in the low dtype."""


IN_BF16 = [{"modules": ["*.experts.gate_up_proj", "*.experts.down_proj"], "param": "bf16"}]


def config(stage, *, is_low=True, **autocast):
    """bf16 autocast; `is_low`: with the override of docs/moe.md. `autocast` are more keys of `torch_autocast`."""
    return {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16", **autocast},
        "zero_optimization": {"stage": stage},
        "zeroamp": {"overrides": IN_BF16 if is_low else []},
    }


@quietly
def train(name, cfg, *, prepare=None):
    """Train a model of `EXPERTS` on this rank; `prepare` is called with the model before it is wrapped."""
    family = EXPERTS[name]
    model = family.seeded()
    if prepare is not None:
        prepare(model)
    zeroamp.wrap_model(model, zeroamp.policy_from_config(cfg), example_inputs=family.batch(0))
    plan = zeroamp.explain(model).plan
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1))
    losses, without_gradient = [], []
    for index in range(NUM_STEPS):
        loss = loss_of(model, family.batch(index * NUM_RANKS + dist.get_rank()))
        losses.append(float(loss.detach()))
        step.backward(loss)
        step.clip_grad_norm()
        if index == 0:
            without_gradient = [fqn for fqn, p in model.named_parameters() if p.requires_grad and p.grad is None]
        step.update()
    return Run(
        losses=losses,
        parameters=full_parameters(model),
        without_gradient=without_gradient,
        low={param.fqn for param in plan.params if param.dtypes.param == torch.bfloat16},
    )

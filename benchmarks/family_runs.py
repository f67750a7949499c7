"""What every rank runs of a family: a training, its resume in a fresh model, and its export."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import zeroamp
from benchmarks.more_families import ALL_FAMILIES
from tests.models.adapters import quietly
from tests.models.families import NUM_RANKS, loss_of
from tests.processes.training import full_parameters

NUM_STEPS = 10
SAVED_AT = 5
LR = 1e-3


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one rank saw."""

    losses: list[float]
    """[step], of the training."""
    parameters: dict[str, torch.Tensor]
    """FQN -> the full parameter at the end of the training."""
    buffers: dict[str, torch.Tensor]
    """FQN -> this rank's buffer then."""
    resumed_losses: list[float]
    """[step], from the save on, of the model that loaded."""
    resumed: dict[str, torch.Tensor]
    """That model's full parameters and buffers at the end."""


def config(safe_list, stage, keep_in_fp32=()):
    """Autocast in bf16 with the default list of safe modules or "auto"; modules that are kept in fp32 beside it."""
    autocast = {"enabled": True, "dtype": "bfloat16"}
    if safe_list == "auto":
        autocast["lower_precision_safe_modules"] = "auto"
    cfg = {"torch_autocast": autocast, "zero_optimization": {"stage": stage}}
    return {**cfg, "data_types": {"keep_in_fp32_modules": list(keep_in_fp32)}} if keep_in_fp32 else cfg


@quietly
def train(name, safe_list, stage, folder):
    """Train, save on the way, resume in a fresh model, and export the first one to `folder/export`."""
    family, folder = ALL_FAMILIES[name], Path(folder)
    model, step = _wrapped(family, safe_list, stage, seed=0)
    losses = _steps(family, model, step, range(SAVED_AT))
    zeroamp.save_checkpoint(folder / "checkpoints", model, step)
    losses += _steps(family, model, step, range(SAVED_AT, NUM_STEPS))
    other, other_step = _wrapped(family, safe_list, stage, seed=1)
    zeroamp.load_checkpoint(folder / "checkpoints", other, other_step)
    resumed_losses = _steps(family, other, other_step, range(SAVED_AT, NUM_STEPS))
    zeroamp.export_hf(model, folder / "export")
    return Run(
        losses=losses,
        parameters=full_parameters(model),
        buffers=_buffers(model),
        resumed_losses=resumed_losses,
        resumed=full_parameters(other) | _buffers(other),
    )


def _wrapped(family, safe_list, stage, seed):
    policy = zeroamp.policy_from_config(config(safe_list, stage, family.keep_in_fp32))
    example = family.batch(0) if safe_list == "auto" else None
    model = zeroamp.wrap_model(family.seeded(seed), policy, example_inputs=example)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    return model, zeroamp.TrainStep(model, optimizer)


def _steps(family, model, train, indices):
    losses = []
    for index in indices:
        loss = loss_of(model, family.batch(index * NUM_RANKS + dist.get_rank()))
        losses.append(float(loss.detach()))
        train.backward(loss)
        train.step()
    return losses


def _buffers(model):
    return {fqn: buffer.clone() for fqn, buffer in model.named_buffers()}

"""The optimizer and scheduler of the fine-tuning example: the config's, or torch's with --lr and --warmup."""

from __future__ import annotations

import argparse
import math
from functools import partial

import torch

import zeroamp

FINAL_LR_FRACTION = 0.1  # fraction of --lr at the last step


def optimizer_and_scheduler(
    policy: zeroamp.Policy, model: torch.nn.Module, args: argparse.Namespace
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Build the config's optimizer and scheduler. A missing block is replaced by torch's, with --lr and --warmup."""
    if policy.optimizer is not None:
        optimizer = zeroamp.optimizer_from_config(policy, model.parameters())
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    if policy.scheduler is not None:
        return optimizer, zeroamp.scheduler_from_config(policy, optimizer)
    factor = partial(lr_factor, warmup=args.warmup, steps=args.steps)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def lr_factor(step: int, *, warmup: int, steps: int) -> float:
    """Fraction of --lr for the optimizer step after `step` steps: linear warmup, then a half cosine."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * 0.5 * (1 + math.cos(math.pi * progress))

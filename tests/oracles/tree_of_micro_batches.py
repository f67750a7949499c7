"""The oracle of reproducible runs: one process, plain torch, no ranks. Imports nothing of zeroamp.

The micro-batches of an optimizer step run one after the other. Their fp32 gradients are added as a balanced binary tree
over their indices, and divided once. Squares and losses are summed as exact fractions.
"""

import copy
import math
from fractions import Fraction

import torch

from tests.oracles.one_process import tree


def train(build, loss_of, batch, *, num_micro_batches, num_steps, make_optimizer, autocast=torch.bfloat16,
          low_dtype=None, clip=0.0, seed_of=None, scale=1.0, growth_interval=2000, overflow_at=None):  # fmt: skip
    """Return (losses[step], norms[step], scales[step], {fqn: parameter}).

    Args:
        build, loss_of, batch: `build()` makes the model, `batch(step, index)` the inputs, `loss_of(model, inputs)` the
            loss of a micro-batch.
        autocast: its dtype; None for none.
        low_dtype: instead, the whole model runs in it, from fp32 master weights; 0-D parameters stay in fp32.
        seed_of: (step, index) -> the seed before a forward.
        scale: the initial loss scale; halved after an overflow. Doubled, as DeepSpeed does, after a step if the number
            of steps between it and the last overflow, or the beginning, is a positive multiple of `growth_interval`.
        overflow_at: (step, index) whose loss is multiplied by inf.
    """
    model = build().train()
    optimizer = make_optimizer(model)
    losses, norms, scales, last_overflow = [], [], [], -1
    for step in range(num_steps):
        values, gradients = [], []
        for index in range(num_micro_batches):
            if seed_of is not None:
                torch.manual_seed(seed_of(step, index))
            run = model if low_dtype is None else _low_copy(model, low_dtype)
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                loss = loss_of(run, _cast(batch(step, index), low_dtype))
            if overflow_at == (step, index):
                loss = loss * math.inf
            trained = [p for p in run.parameters() if p.requires_grad]
            gradients.append(torch.autograd.grad(loss.float() * scale, trained, allow_unused=True))
            values.append(loss.detach().float())
        trained = [p for p in model.parameters() if p.requires_grad]
        for position, parameter in enumerate(trained):
            parts = [each[position] for each in gradients]
            zero = torch.zeros_like(parameter)
            used = any(part is not None for part in parts)
            parameter.grad = tree([zero if part is None else part for part in parts]) if used else None
        squares = [p.grad.double().square().flatten() for p in trained if p.grad is not None]
        total = torch.cat(squares)
        is_finite = bool(total.isfinite().all())
        exact = float(sum(map(Fraction, total.tolist()))) if is_finite else math.nan
        divide_by = scale * num_micro_batches
        norm = torch.tensor(math.sqrt(exact) / divide_by, dtype=torch.float64).float()
        losses.append(_sum(values) / num_micro_batches)
        norms.append(float(norm))
        scales.append(scale)
        if is_finite:
            factor = torch.ones(()) if clip == 0 else (clip / (norm + 1e-6)).clamp(max=1.0)
            for parameter in trained:
                if parameter.grad is not None:
                    parameter.grad *= factor / divide_by
            optimizer.step()
            between = step - last_overflow - 1
            if growth_interval and between > 0 and between % growth_interval == 0:
                scale *= 2
        else:
            scale, last_overflow = scale / 2, step
        model.zero_grad()
    return losses, norms, scales, {fqn: p.detach().clone() for fqn, p in model.named_parameters()}


def _low_copy(model, dtype):
    """A copy of a model in `dtype`; 0-D parameters are left in fp32."""
    low = copy.deepcopy(model).to(dtype)
    for parameter, original in zip(low.parameters(), model.parameters(), strict=True):
        if parameter.dim() == 0:
            parameter.data = original.detach().clone()
    return low


def _cast(inputs, dtype):
    return inputs.to(dtype) if dtype is not None and inputs.is_floating_point() else inputs


def _sum(values):
    numbers = [float(value) for value in values]
    return float(sum(map(Fraction, numbers))) if all(map(math.isfinite, numbers)) else math.nan

"""The oracle of parallel training: one process, plain torch, whole sequences and weights. Imports nothing of ours."""

import contextlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """What one process computed for all data ranks."""

    losses: list[float]
    """[step], the mean over data ranks and micro-batches."""
    norms: list[float]
    """[step], of the mean gradient, before clipping, summed in fp64."""
    gradients: dict[str, torch.Tensor]
    """Of the first step, before clipping."""
    parameters: dict[str, torch.Tensor]
    """At the end."""


def train(model, samples, num_steps, *, num_data, accumulation=1, clip=0.0, autocast=None, lr=1e-2):
    """Train on `samples(index)`, with the index of data rank r in micro-batch m being m x num_data + r."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    losses, norms, first = [], [], {}
    for step in range(num_steps):
        total = 0.0
        for micro in range(accumulation):
            for rank in range(num_data):
                inputs = samples((step * accumulation + micro) * num_data + rank)
                cast = torch.autocast("cpu", dtype=autocast) if autocast is not None else contextlib.nullcontext()
                with cast:
                    loss = model(*inputs) / (num_data * accumulation)
                loss.backward()
                total += float(loss.detach())
        losses.append(total)
        gradients = {fqn: p.grad.clone() for fqn, p in model.named_parameters() if p.requires_grad}
        first = first or gradients
        norms.append(float(torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt()))
        if clip:
            factor = min(1.0, clip / (norms[-1] + 1e-6))
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
    parameters = {fqn: p.detach().clone() for fqn, p in model.named_parameters()}
    return WholeRun(losses=losses, norms=norms, gradients=first, parameters=parameters)

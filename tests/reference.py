"""The oracle: one process, plain torch, the ranks written out. Imports nothing of zeroamp.

fp32 parameters, `torch.autocast`, each rank's micro-batches one after the other, gradients averaged by written-out sums.
"""

import torch

from tests.models import batch, build, loss_of


def train(name, *, world_size, num_steps, accumulation=1, autocast=torch.bfloat16, clip=0.0, reduce_each=False, lr=1e-2):
    """Return (losses[step][rank][micro], norms[step], {fqn: parameter}).

    reduce_each: average over ranks after every micro-batch, then accumulate (stages 2 and 3), instead of accumulating
    on each rank and averaging once (stages 0 and 1).
    """
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    losses, norms = [], []
    for step in range(num_steps):
        by_rank = [[_gradients(name, model, step, rank, micro, world_size, accumulation, autocast)
                    for micro in range(accumulation)] for rank in range(world_size)]  # fmt: skip
        losses.append([[loss for loss, _ in micros] for micros in by_rank])
        gradients = [[gradient for _, gradient in micros] for micros in by_rank]
        for index, parameter in enumerate(model.parameters()):
            table = [[micro[index] for micro in rank] for rank in gradients]
            parameter.grad = _combine(table, world_size, reduce_each)
        norms.append(_clip(model, clip))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {fqn: p.detach().clone() for fqn, p in model.named_parameters()}


def _gradients(name, model, step, rank, micro, world_size, accumulation, autocast):
    inputs = batch(name, (step * accumulation + micro) * world_size + rank)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = loss_of(model, inputs)
    gradients = torch.autograd.grad(loss / accumulation, list(model.parameters()), materialize_grads=True)
    return float(loss.detach()), gradients


def _combine(table, world_size, reduce_each):
    """table[rank][micro] -> the averaged, accumulated fp32 gradient."""
    num_micros = len(table[0])
    if not reduce_each:
        table = [[_sum(micros)] for micros in table]
        num_micros = 1
    return _sum([_sum([table[rank][micro] for rank in range(world_size)]) / world_size for micro in range(num_micros)])


def _sum(tensors):
    total = tensors[0].float().clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _clip(model, clip):
    squares = torch.stack([p.grad.double().pow(2).sum() for p in model.parameters()])
    norm = squares.sum().sqrt().float()
    if clip > 0:
        factor = (clip / (norm + 1e-6)).clamp(max=1.0)
        for parameter in model.parameters():
            parameter.grad *= factor
    return float(norm)

"""The oracle: one process, plain torch, the ranks written out. Imports nothing of zeroamp.

fp32 parameters, `torch.autocast`, each rank's micro-batches one after the other, averages as written-out sums.
"""

import copy
import math

import torch

from tests.models.small import batch, build, loss_of


def train(
    name,
    *,
    world_size,
    num_steps,
    accumulation=1,
    autocast=torch.bfloat16,
    low_model=None,
    clip=0.0,
    reduce_each=False,
    num_replicas=1,
    lr=1e-2,
    prepare=None,
    loss_scale=1.0,
    device="cpu",
    make_optimizers=None,
    sent_as=None,
    loss_fn=loss_of,
):
    """Return (losses[step][rank][micro], norms[step], {fqn: parameter}).

    autocast: its dtype, or None for none. low_model: instead, run the whole model in this dtype, fp32 master weights.
    reduce_each: average over ranks after every micro-batch, then accumulate (stages 2 and 3), instead of accumulating
    on each rank and averaging once (stages 0 and 1).
    accumulation: micro-batches per optimizer step, one number, or one per step.
    loss_scale: a fixed one, a power of two. With one above 1, a step whose norm is not finite is skipped.
    num_replicas: neighbouring ranks share a shard group. Their sums, added over micro-batches, are then summed over the
    replicas (HSDP), and divided by the number of all ranks.
    make_optimizers: {fqn: parameter} -> the optimizers, in place of AdamW.
    sent_as: FQN of a parameter -> the dtype in which ranks send its gradient; the others are sent as they are.
    loss_fn: (model, inputs) -> the loss, which is computed under autocast, too.
    """
    model = build(name)
    if prepare is not None:
        prepare(model)
    model.to(device)
    if make_optimizers is None:
        optimizers = [torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)]
    else:
        optimizers = make_optimizers(dict(model.named_parameters()))
    losses, norms = [], []
    counts = [accumulation] * num_steps if isinstance(accumulation, int) else accumulation
    for step, count in enumerate(counts):
        by_rank = []
        for rank in range(world_size):
            indices = [(sum(counts[:step]) + micro) * world_size + rank for micro in range(count)]
            by_rank.append(
                [
                    _gradients(model, batch(name, i).to(device), count / loss_scale, autocast, low_model, loss_fn)
                    for i in indices
                ]
            )
        losses.append([[loss for loss, _ in micros] for micros in by_rank])
        gradients = [[gradient for _, gradient in micros] for micros in by_rank]
        for index, (fqn, parameter) in enumerate(_trainable(model).items()):
            table = [[micro[index] for micro in rank] for rank in gradients]
            parameter.grad = combine(table, reduce_each, num_replicas, (sent_as or {}).get(fqn))
            if parameter.grad is not None:
                parameter.grad /= loss_scale
        norms.append(clip_norm(model, clip))
        if loss_scale == 1 or math.isfinite(norms[-1]):
            for optimizer in optimizers:
                optimizer.step()
        model.zero_grad()
    return losses, norms, {fqn: p.detach().cpu().clone() for fqn, p in model.named_parameters()}


def _trainable(model):
    return {fqn: parameter for fqn, parameter in model.named_parameters() if parameter.requires_grad}


def _gradients(model, inputs, accumulation, autocast, low_model, loss_fn):
    if low_model is not None:
        return _gradients_of_low_model(model, inputs, accumulation, low_model, loss_fn)
    with torch.autocast(inputs.device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = loss_fn(model, inputs)
    gradients = torch.autograd.grad(loss.float() / accumulation, list(_trainable(model).values()), allow_unused=True)
    return float(loss.detach()), gradients


def _gradients_of_low_model(model, inputs, accumulation, dtype, loss_fn):
    low = copy.deepcopy(model)
    for parameter in low.parameters():  # buffers keep their dtype
        parameter.data = parameter.data.to(dtype)
    if inputs.is_floating_point():
        inputs = inputs.to(dtype)
    loss = loss_fn(low, inputs)
    gradients = torch.autograd.grad(loss.float() / accumulation, list(_trainable(low).values()), allow_unused=True)
    return float(loss.detach()), gradients


def combine(table, reduce_each, num_replicas=1, dtype=None):
    """table[rank][micro] -> the averaged, accumulated fp32 gradient. None, of an unused parameter, counts as zeros.

    None if all are None, as autograd leaves it.
    """
    if all(gradient is None for rank in table for gradient in rank):
        return None
    like = next(gradient for rank in table for gradient in rank if gradient is not None)
    table = [[torch.zeros_like(like) if gradient is None else gradient for gradient in rank] for rank in table]
    if not reduce_each:
        table = [[ordered_sum(micros)] for micros in table]
    if dtype is not None:
        table = [[gradient.to(dtype) for gradient in micros] for micros in table]
    if num_replicas == 1:
        return ordered_sum([tree(micros) / len(table) for micros in zip(*table, strict=True)])
    shard_size = len(table) // num_replicas
    replicas = [table[i : i + shard_size] for i in range(0, len(table), shard_size)]
    return tree([ordered_sum([tree(micros) for micros in zip(*ranks, strict=True)]) for ranks in replicas]) / len(table)


def tree(ranks):
    """The sum over ranks: a balanced binary tree in fp32, whose left part is the largest power of two."""
    if len(ranks) == 1:
        return ranks[0].float()
    left = 1
    while 2 * left < len(ranks):
        left *= 2
    return tree(ranks[:left]) + tree(ranks[left:])


def ordered_sum(tensors):
    total = tensors[0].float().clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def clip_norm(model, clip):
    """Return the norm of the gradients, which are clipped to `clip`, unless it is 0."""
    with_gradient = [p for p in _trainable(model).values() if p.grad is not None]
    squares = torch.stack([p.grad.double().pow(2).sum() for p in with_gradient])
    norm = squares.sum().sqrt().float()
    if clip > 0:
        factor = (clip / (norm + 1e-6)).clamp(max=1.0)
        for parameter in with_gradient:
            parameter.grad *= factor
    return float(norm)

"""The oracle of overrides: one process, plain autocast, the dtypes of some modules written out. No zeroamp.

A module that computes in fp32 runs inside `torch.autocast(enabled=False)` and takes its floating inputs as fp32. A
parameter that is all-gathered in bf16 is a bf16 parameter while the model runs. A gradient is cast to the dtype in
which it is sent, and summed over ranks in fp32, or, of a native reduction, in the dtype in which it is sent.
"""

import copy

import torch
from torch import nn

from tests.models.small import batch, build, loss_of


def train(
    name, *, world_size, num_steps, in_fp32=(), gathered_low=(), sent_as=None, native=(), accumulation=1, reduce_each
):
    """Return (losses[step][rank][micro], {fqn: parameter}).

    in_fp32: FQNs of modules. gathered_low: of parameters. sent_as: FQN of a parameter -> dtype; others are sent as they
    are. native: FQNs of parameters whose gradients are summed in the dtype in which they are sent.
    reduce_each: average over ranks after every micro-batch (stages 2 and 3), else once (stages 0 and 1).
    """
    model, sent_as = build(name), sent_as or {}
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for step in range(num_steps):
        runs = [
            [
                _run(model, batch(name, (step * accumulation + micro) * world_size + rank), in_fp32, gathered_low)
                for micro in range(accumulation)
            ]
            for rank in range(world_size)
        ]
        losses.append([[loss for loss, _ in micros] for micros in runs])
        for fqn, parameter in parameters.items():
            of_rank = [[gradients[fqn] for _, gradients in micros] for micros in runs]
            dtype = sent_as.get(fqn)
            if reduce_each:
                averages = [_average(micro, dtype, fqn in native) for micro in zip(*of_rank, strict=True)]
                parameter.grad = _sum(averages)
            else:
                low = fqn in native and accumulation == 1
                sums = [micros[0] if len(micros) == 1 else _sum(micros) for micros in of_rank]
                parameter.grad = _average(sums, dtype, low)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {fqn: parameter.detach().clone() for fqn, parameter in parameters.items()}


def _run(model, inputs, in_fp32, gathered_low):
    model = copy.deepcopy(model)
    fqns = [fqn for fqn, _ in model.named_parameters()]
    for fqn in gathered_low:
        owner, _, attribute = fqn.rpartition(".")
        low = nn.Parameter(model.get_parameter(fqn).detach().to(torch.bfloat16))
        setattr(model.get_submodule(owner), attribute, low)
    for fqn in in_fp32:
        _run_in_fp32(model.get_submodule(fqn))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, inputs)
    # Weights that autocast casts have fp32 gradients here, whose values are those of bf16.
    gradients = torch.autograd.grad(loss.float(), [model.get_parameter(fqn) for fqn in fqns])
    return float(loss.detach()), dict(zip(fqns, gradients, strict=True))


def _run_in_fp32(module):
    forward = module.forward

    def in_fp32(x):
        with torch.autocast("cpu", enabled=False):
            return forward(x.float())

    module.forward = in_fp32


def _average(gradients, dtype, is_native):
    sent = [gradient.to(dtype or gradient.dtype) for gradient in gradients]
    if is_native:
        total = sent[0].to(torch.bfloat16)
        for gradient in sent[1:]:
            total = total + gradient.to(torch.bfloat16)
        return (total / len(sent)).float()
    return _sum(sent) / len(sent)


def _sum(tensors):
    total = tensors[0].float().clone()
    for tensor in tensors[1:]:
        total += tensor
    return total

"""The oracle of a plain loop of any model: one process, two ranks one after the other. Imports nothing of zeroamp."""

import copy
from contextlib import nullcontext

import torch

from tests.oracles.one_process import combine

NUM_RANKS = 2
LEARNING_RATE = 0.1


def train(model, loss_of, num_steps, *, mode="autocast"):
    """Return (losses[rank][step], {FQN: parameter}) of SGD. `loss_of` is called with (model, number of the batch).

    mode: "autocast" in bf16; "bf16", which runs a copy of the model in bf16; or "fp32".
    """
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD(named.values(), lr=LEARNING_RATE)
    losses = [[] for _ in range(NUM_RANKS)]
    for step in range(num_steps):
        gradients = []
        for rank in range(NUM_RANKS):
            runs = copy.deepcopy(model).bfloat16() if mode == "bf16" else model
            with torch.autocast("cpu", dtype=torch.bfloat16) if mode == "autocast" else nullcontext():
                loss = loss_of(runs, step * NUM_RANKS + rank)
            losses[rank].append(float(loss.detach()))
            loss.backward()
            gradients.append([[parameter.grad for parameter in runs.parameters()]])
            runs.zero_grad()
        for position, parameter in enumerate(named.values()):
            parameter.grad = combine([[micro[position] for micro in of_rank] for of_rank in gradients], True)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {fqn: parameter.detach() for fqn, parameter in named.items()}

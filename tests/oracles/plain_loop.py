"""The oracle of a plain loop: one process, plain torch, the ranks one after the other. Imports nothing of zeroamp."""

import torch

from tests.models.families import NUM_RANKS, loss_of
from tests.oracles.one_process import combine


class PlainStep:
    """The calls of a `TrainStep` with `accumulation` micro-batches, in plain torch."""

    def __init__(self, model, optimizer, clip=0.0, accumulation=1):
        self.model, self.optimizer, self.clip, self.accumulation = model, optimizer, clip, accumulation
        self._num_backwards = 0

    def zero_grad(self):
        self.optimizer.zero_grad()

    def backward(self, loss):
        self._num_backwards += 1
        (loss.float() / self.accumulation).backward()

    def step(self):
        """Do nothing before the last micro-batch."""
        if self._num_backwards % self.accumulation == 0:
            if self.clip > 0:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()


def index_of(step, micro, rank, num_micro):
    """The number of a rank's micro-batch."""
    return (step * num_micro + micro) * NUM_RANKS + rank


def train(family, *, num_steps, num_micro, make_optimizer, reduces_each=True, clip=None):
    """Return (losses[rank][step][micro], FQNs without gradient per step, {FQN: parameter}, gradient norms per step).

    Each micro-batch's loss is divided by `num_micro`. reduces_each: average over ranks after each micro-batch, then
    add, instead of adding on each rank and averaging once.
    """
    model = family.seeded()
    named = {fqn: parameter for fqn, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = make_optimizer(model.parameters())
    losses, without, norms = [[[] for _ in range(num_steps)] for _ in range(NUM_RANKS)], [], []
    for step in range(num_steps):
        gradients = [[] for _ in range(NUM_RANKS)]  # [rank][micro] -> one per parameter
        for micro in range(num_micro):
            for rank in range(NUM_RANKS):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = loss_of(model, family.batch(index_of(step, micro, rank, num_micro)))
                losses[rank][step].append(float(loss.detach()))
                scaled = loss / num_micro
                gradients[rank].append(torch.autograd.grad(scaled, list(named.values()), allow_unused=True))
        for position, parameter in enumerate(named.values()):
            table = [[of_micro[position] for of_micro in of_rank] for of_rank in gradients]
            parameter.grad = combine(table, reduces_each)
        without.append([fqn for fqn, parameter in named.items() if parameter.grad is None])
        if clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, without, {fqn: parameter.detach() for fqn, parameter in model.named_parameters()}, norms

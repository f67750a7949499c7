"""Collects the losses of one rank in an optimizer step. The step's all-reduce then sums them over the ranks."""

from typing import NamedTuple

import torch


class LossSum(NamedTuple):
    """A sum of losses of one rank, and the number to divide it by."""

    terms: torch.Tensor
    """1-D fp32: the sum as one element; or one element per micro-batch, where the order of additions matters."""
    divisor: int
    """The mean of the losses is the sum of `terms`, divided by this number."""
    is_divided: bool
    """Whether `TrainStep.backward` divided the losses by `gradient_accumulation_steps`."""


class StepLosses:
    """Sums the losses of an optimizer step's micro-batches in fp32, in order. `retains_each`: retains each loss."""

    def __init__(self, *, retains_each: bool = False) -> None:
        self._retains_each = retains_each
        self._terms: dict[bool, list[torch.Tensor]] = {True: [], False: []}  # by whether `backward` divided the loss
        self.num_divided = 0
        """Number of losses that `backward` divided by `gradient_accumulation_steps`."""

    def add(self, loss: torch.Tensor, *, is_divided: bool) -> None:
        """Add the loss of one micro-batch, a tensor of one element in any floating-point dtype."""
        loss, terms = loss.detach().float().reshape(()), self._terms[is_divided]
        self.num_divided += is_divided
        if terms and not self._retains_each:
            terms[0] = terms[0] + loss
        else:
            terms.append(loss)

    @property
    def are_divided(self) -> bool | None:
        """Whether `backward` divided the losses: True if it divided any, None before the first loss."""
        return True if self._terms[True] else (False if self._terms[False] else None)

    def sums(self) -> list[LossSum]:
        """Return the sum of the divided losses and the sum of the others, without empty sums."""
        divisors = {True: self.num_divided, False: 1}
        return [LossSum(torch.stack(terms), divisors[kind], kind) for kind, terms in self._terms.items() if terms]

    def reset(self) -> None:
        """Forget all losses."""
        self._terms, self.num_divided = {True: [], False: []}, 0

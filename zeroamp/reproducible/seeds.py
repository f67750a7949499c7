"""Seeds the random numbers of each micro-batch, for `zeroamp.reproducible`.

[Note: Random numbers of a micro-batch]
A rank draws the dropout of its micro-batches one after the other, and which micro-batches it has depends on the number
of ranks. So the generators of a rank (torch's, Python's and NumPy's) are seeded when the first forward of a micro-batch
begins, and restored when its backward has ended. The seed is a hash of `zeroamp.seed`, the number of the optimizer
step, and the index of the micro-batch among those of all ranks. Numbers that the loop or a data loader draws in between
are not affected. A recomputation inside the backward (activation checkpointing) restores its own states, as in torch.
"""

import random
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from zeroamp.hooks.random_state import random_state, set_random_state
from zeroamp.hooks.root_forward import ForwardCall
from zeroamp.planning.mesh import device_of
from zeroamp.policies.errors import StepError
from zeroamp.reproducible.order import micro_batch_index
from zeroamp.training.step import TrainStep
from zeroamp.wrapping.state import WrapState, wrap_state


def seed_of(seed: int, step: int, index: int) -> int:
    """Return the seed of a micro-batch, below 2^63: a hash of three integers, the same on every machine."""
    digest = blake2b(f"{seed} {step} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def micro_batch_seed(train: TrainStep) -> int:
    """Return the seed of this rank's next micro-batch, below 2^63: a function of `zeroamp.seed`, step and index.

    The generators have this seed when its forward begins. Use it for random numbers that the loop draws before the
    forward, noise for example: `torch.Generator().manual_seed(zeroamp.micro_batch_seed(train))`.

    Raises:
        StepError: `zeroamp.reproducible` is false.
    """
    policy = wrap_state(train.model).plan.policy
    if not policy.reproducible:
        raise StepError(
            'zeroamp.micro_batch_seed needs "zeroamp": {"reproducible": true} in the config, but it is false.'
        )
    return seed_of(policy.seed, train.num_steps + train.num_skipped, micro_batch_index(train))


class MicroBatchRandomness:
    """Seeds the generators for each micro-batch: see [Note: Random numbers of a micro-batch]."""

    def __init__(self, state: WrapState, seed: Callable[[], int]) -> None:
        """`seed` returns the seed of the micro-batch whose forward begins."""
        self._state = state
        self._seed = seed
        self._device = device_of(state.mesh)
        self._outer: dict[str, Any] | None = None  # the loop's states, while a micro-batch runs
        state.root_forward.add("random state", self._begin)

    def _begin(self, call: ForwardCall) -> None:
        is_first = self._outer is None and call.is_outermost
        if not (is_first and self._state.root.training and torch.is_grad_enabled()) or self._state.step.is_observed:
            return
        self._outer = random_state(self._device)
        seed = self._seed()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # models may use the global generator

    def end(self) -> None:
        """Restore the loop's states. Call after each backward, and when a micro-batch is discarded."""
        if self._outer is not None:
            set_random_state(self._outer, self._device)
            self._outer = None

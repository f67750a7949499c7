"""Seeds the random numbers of each micro-batch, and checks optimizers and losses, for `zeroamp.reproducible`.

[Note: Random numbers of a micro-batch]
A rank draws the dropout of its micro-batches one after the other, and which micro-batches it has depends on the number
of ranks. So the generators of a rank (torch's, Python's and NumPy's) are seeded when the first forward of a micro-batch
begins, and restored when its backward has ended. The seed is a hash of `zeroamp.seed`, the number of the optimizer
step, and the index of the micro-batch among those of all ranks. Numbers that the loop or a data loader draws in between
are not affected. A recomputation inside the backward (activation checkpointing) restores its own states, as in torch.
"""

import random
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from zeroamp.hooks.random_state import random_state, set_random_state
from zeroamp.hooks.root_forward import ForwardCall
from zeroamp.planning.mesh import device_of
from zeroamp.policies.errors import StepError
from zeroamp.policies.policy import Policy
from zeroamp.training.optimizer_kinds import ELEMENTWISE, is_of_bitsandbytes
from zeroamp.wrapping.state import WrapState


def seed_of(seed: int, step: int, index: int) -> int:
    """Return the seed of a micro-batch, below 2^63: a hash of three integers, the same on every machine."""
    digest = blake2b(f"{seed} {step} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


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
        if not (is_first and self._state.root.training and torch.is_grad_enabled()) or self._state.is_observed:
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


def refuse_division(policy: Policy, *, divide: bool, others: bool | None) -> None:
    """Raise StepError if gradients would depend on the number of ranks, because of how losses are divided.

    `divide`: the argument of `TrainStep.backward`. `others`: that of the optimizer step's earlier micro-batches, or
    None before the first.
    """
    if others not in (None, divide):
        raise StepError(
            "TrainStep.backward got divide=True for some micro-batches of an optimizer step and False for others. "
            "With zeroamp.reproducible all gradients are divided by one number. Pass the same value for all of them."
        )
    if divide and policy.reduce == "sum":
        raise StepError(
            'TrainStep.backward got divide=True with zeroamp.reproducible and zeroamp.reduce "sum". The sum over ranks '
            "of means over each rank's micro-batches is larger on more ranks. Divide losses by a count over the "
            'micro-batches of all ranks and pass divide=False, or leave reduce at "mean".'
        )
    if not divide and policy.reduce == "mean" and policy.low_dtype == torch.float16:
        raise StepError(
            'TrainStep.backward got divide=False in float16 with zeroamp.reproducible and zeroamp.reduce "mean". The '
            "loop's own divisor then depends on the number of ranks, and in float16 small gradients underflow. Pass "
            'divide=True, or set reduce to "sum" and divide by a count over the micro-batches of all ranks. If the '
            "loop belongs to a library that divides losses itself, as transformers' Trainer does, use bfloat16."
        )


def refuse_dependence_on_shards(optimizer: torch.optim.Optimizer, *, on_shards: bool) -> None:
    """Raise StepError for an optimizer whose updates may depend on how parameters are sharded."""
    name = type(optimizer).__name__
    if is_of_bitsandbytes(optimizer):
        raise StepError(
            f"TrainStep was given bitsandbytes' {name} with zeroamp.reproducible. Its state is quantized in blocks of "
            "each rank's shard, so its updates depend on the number of ranks. Use torch.optim.AdamW."
        )
    if any(group.get("fused") is True and _has_cpu(group["params"]) for group in optimizer.param_groups):
        # Fused Adam rounds the elements after the last full vector of a shard differently.
        raise StepError(
            f"TrainStep was given {name} with fused=True and parameters on the CPU, with zeroamp.reproducible. The "
            "fused kernels of the CPU may round the last elements of a shard differently, so updates would depend on "
            'the number of ranks. Pass fused=False; in TrainingArguments, optim="adamw_torch".'
        )
    if not (on_shards or type(optimizer) in ELEMENTWISE or type(optimizer) is torch.optim.Muon):
        raise StepError(
            f"TrainStep was given {name} with zeroamp.reproducible, but its updates may depend on the number of ranks. "
            "Use torch.optim.AdamW, another element-wise optimizer of torch, or torch.optim.Muon. "
            "If the optimizer is element-wise, pass on_shards=True."
        )


def _has_cpu(parameters: Iterable[torch.Tensor]) -> bool:
    return any(parameter.device.type == "cpu" for parameter in parameters)

"""Warnings about a run: each is logged once, with the numbers and the remedy. Training is not changed."""

import logging
import math
from collections.abc import Callable, Sequence
from statistics import median

from zeroamp.policies.policy import Policy
from zeroamp.reporting.step_record import StepRecord

logger = logging.getLogger("zeroamp")

NUM_BAD_STEPS = 10
"""Steps in a row with a zero or non-finite norm before a warning. Dynamic loss scaling overflows a few times at first.
"""
SLOW_RANK_MARGIN = 0.2
"""A rank is slow if its busy time is more than this fraction above the median of all ranks."""


class RunWarnings:
    """Checks every record, on the first rank, and logs each warning once."""

    def __init__(self, policy: Policy, listener: Callable[[str, str], None]) -> None:
        """`listener` is called with the name and the text of each warning."""
        self._policy = policy
        self._listener = listener
        self._given: set[str] = set()
        self._num_bad = {"zero gradients": 0, "non-finite gradients": 0}

    def step(self, record: StepRecord) -> None:
        """Warn of the gradient norm or the loss scale of one step."""
        self._look_at_gradient(record)
        self._look_at_scale(record)

    def look_at_ranks(self, busy_s: Sequence[float], num_flushes: Sequence[int], num_steps: int) -> None:
        """Warn of a slow rank, and of allocator flushes.

        Args:
            busy_s: each rank's median busy time in the last `num_steps` steps, in seconds.
            num_flushes: each rank's flushes of its allocator's cache in these steps.
            num_steps: how many steps.
        """
        typical, slowest = median(busy_s), max(busy_s)
        if slowest > (1 + SLOW_RANK_MARGIN) * typical:
            self._warn(
                "slow rank",
                f"rank {busy_s.index(slowest)} was busy for {slowest * 1e3:.1f} ms per step (median of the last "
                f"{num_steps} steps), {slowest / typical - 1:.0%} above the median of the ranks "
                f"({typical * 1e3:.1f} ms). The other ranks wait for it. Check its data loading, its clocks and other "
                "processes on its node",
            )
        if max(num_flushes) > 0:
            self._warn(
                "allocator flushes",
                f"rank {num_flushes.index(max(num_flushes))} flushed its allocator's cache {max(num_flushes)} times in "
                f"the last {num_steps} steps (num_alloc_retries). Each flush waits for the device. Use smaller "
                "micro-batches, or set PYTORCH_ALLOC_CONF=expandable_segments:True",
            )

    def _look_at_gradient(self, record: StepRecord) -> None:
        zero = "Check that the loss depends on trainable parameters and, in float16, that the loss scale is not too low"
        non_finite = "Lower the learning rate, clip gradients, or check the data of these steps"
        for name, is_so, remedy in (
            ("zero gradients", record.grad_norm == 0, zero),
            ("non-finite gradients", not math.isfinite(record.grad_norm), non_finite),
        ):
            self._num_bad[name] = self._num_bad[name] + 1 if is_so else 0
            if self._num_bad[name] >= NUM_BAD_STEPS:
                self._warn(
                    name,
                    f"gradient norm {record.grad_norm} for {NUM_BAD_STEPS} steps in a row, the last after "
                    f"step {record.step} with loss {record.loss:.4g}. {remedy}",
                )

    def _look_at_scale(self, record: StepRecord) -> None:
        if record.is_scale_exhausted:
            self._warn(
                "loss scale at minimum",
                "overflows have brought the loss scale to "
                f"fp16.min_loss_scale {self._policy.loss_scale.minimum:g} and used up its hysteresis by step "
                f"{record.step}: an overflow in the next step ends the run. Lower the learning rate, clip gradients, "
                "or use bfloat16, which needs no loss scale",
            )

    def _warn(self, name: str, text: str) -> None:
        if name in self._given:
            return
        self._given.add(name)
        logger.warning("%s: %s", name, text)
        self._listener(name, text)

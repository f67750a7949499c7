"""Warnings about a run, each given once, with figures and what to do. They change nothing."""

import logging
import math
from collections.abc import Callable, Sequence
from statistics import median

from zeroamp.planning.plan import Plan
from zeroamp.reporting.step_record import GIB, StepRecord
from zeroamp.wrapping.summary import MIB

logger = logging.getLogger("zeroamp")

NUM_BAD_STEPS = 10
"""Steps in a row without a usable gradient. Dynamic loss scaling overflows a few times when it begins."""
SLOW_RANK_MARGIN = 0.2
"""A rank is slow where its busy time is more than this fraction above the median of all."""
DOMINANT_UNIT_FRACTION = 0.5
"""A unit dominates if its unsharded parameters and gradients are more than this part of what a rank then holds."""
DOMINANT_UNIT_BYTES = 256 * MIB
"""Smaller units never do."""
LATENCY_BOUND_BYTES = 1 * MIB
"""A collective below this takes longer to start than to move: tens of microseconds, at tens of GB/s."""
ADAM_BYTES_PER_ELEMENT = 16
"""fp32 parameter, gradient and two moments."""


class RunWarnings:
    """Checks a plan once and every record. On the first rank."""

    def __init__(self, plan: Plan, num_shards: int, num_ranks: int) -> None:
        self.listeners: list[Callable[[str, str], None]] = []
        """Called with the name and the text of each warning."""
        self._plan = plan
        self._num_shards = num_shards
        self._num_ranks = num_ranks
        self._given: set[str] = set()
        self._num_bad = {"zero gradients": 0, "non-finite gradients": 0}

    def look_at_plan(self) -> None:
        """Look at sizes of units and groups."""
        if self._num_ranks > 1:
            self._look_at_small_groups()
        if self._plan.policy.stage == 3 and self._num_shards > 1:
            self._look_at_large_units()

    def step(self, record: StepRecord) -> None:
        """Look at one step."""
        self._look_at_gradient(record)
        self._look_at_scale(record)

    def look_at_ranks(self, busy_s: Sequence[float], num_flushes: Sequence[int], num_steps: int) -> None:
        """Look at each rank's median busy time of the last `num_steps` steps, and its allocator's flushes in them."""
        typical, slowest = median(busy_s), max(busy_s)
        if slowest > (1 + SLOW_RANK_MARGIN) * typical:
            self._warn(
                "slow rank",
                f"rank {busy_s.index(slowest)} was busy for {slowest * 1e3:.1f} ms in the median of the last "
                f"{num_steps} steps, {slowest / typical - 1:.0%} above the median of the ranks "
                f"({typical * 1e3:.1f} ms): the others wait. Look at its data loading, clocks and neighbours",
            )
        if max(num_flushes) > 0:
            self._warn(
                "allocator flushes",
                f"rank {num_flushes.index(max(num_flushes))} flushed its allocator's cache {max(num_flushes)} times in "
                f"the last {num_steps} steps (num_alloc_retries), and each waits for the device. Take smaller "
                "micro-batches, or PYTORCH_ALLOC_CONF=expandable_segments:True",
            )

    def _look_at_gradient(self, record: StepRecord) -> None:
        zero = "Check that the loss depends on trainable parameters, and its scale in float16"
        non_finite = "Lower the learning rate, clip, or look at the data of these steps"
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
                f"fp16.min_loss_scale {self._plan.policy.loss_scale.minimum:g} and used up its hysteresis by step "
                f"{record.step}: an overflow in the next step ends the run. Lower the learning rate, clip, or use "
                "bfloat16, which needs no scale",
            )

    def _look_at_small_groups(self) -> None:
        sizes = {
            group.name: sum(param.numel * param.dtypes.param.itemsize for param in group.params)
            for group in self._plan.groups
            if group.kind != "model-wide"  # all-gathered once per step
        }
        small = {name: size for name, size in sizes.items() if size < LATENCY_BOUND_BYTES}
        if small:
            name = min(small, key=lambda name: small[name])
            self._warn(
                "latency-bound groups",
                f"{len(small)} of {len(sizes)} groups all-gather less than {LATENCY_BOUND_BYTES / MIB:g} MiB at once, "
                f"{name} {small[name] / 1024:.1f} KiB: their collectives take longer to start than to move. Merge "
                "units by zero_optimization.reduce_bucket_size, choose larger ones by auto_wrap_policy, or raise "
                "stage3_param_persistence_threshold for small fp32 parameters",
            )

    def _look_at_large_units(self) -> None:
        sizes: dict[str, int] = {}
        for group in self._plan.groups:
            for param in group.params:
                gradient = param.numel * group.key.communication.itemsize if param.is_trainable else 0
                gathered = param.numel * param.dtypes.param.itemsize
                sizes[group.unit] = sizes.get(group.unit, 0) + gathered + gradient
        unit = max(sizes, key=lambda unit: sizes[unit])
        numel = sum(param.numel for param in self._plan.params)
        held = numel * ADAM_BYTES_PER_ELEMENT / self._num_shards
        share = sizes[unit] / (sizes[unit] + held)
        if share > DOMINANT_UNIT_FRACTION and sizes[unit] > DOMINANT_UNIT_BYTES:
            self._warn(
                "dominant unit",
                f"unit {unit or 'root'} takes {sizes[unit] / GIB:.2f} GiB while it is unsharded, with its gradients, "
                f"{share:.0%} of it and the {held / GIB:.2f} GiB of shards that a rank holds (with AdamW): more ranks "
                "cannot lower the peak. Make units of its parts by auto_wrap_policy",
            )

    def _warn(self, name: str, text: str) -> None:
        if name in self._given:
            return
        self._given.add(name)
        logger.warning("%s: %s", name, text)
        for listen in self.listeners:
            listen(name, text)

"""Host time of zeroamp's own Python in `TrainStep.step()`, without torch's `optimizer.step` and the clip's kernels.

    python -m benchmarks.step_python [--parameters 291 1137] [--rounds 100] [--optimizers fused foreach] [--out FOLDER]

The model has as many parameters as a LLaMA (291: 8B, 1,137: 405B), each of a few elements, so that kernels take little
time. The process is rank 0 of two fake ranks, whose collectives return at once. "own, after the sum" is zeroamp's time
from the return of the step's all-reduce to the return of `step()`. "sum to update" is the part of it before
`optimizer.step`, for which the update waits on an accelerator. Each value is CPU time of the thread, the median over
the rounds after ten warm-up steps, with the garbage collector off.
"""

import argparse
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn

import zeroamp
from benchmarks.fake_ranks import fake_ranks
from benchmarks.output import add_out, emit

WARM_UP = 10  # steps
PARTS = ("before the sum", "sum to update", "optimizer.step", "clip's kernels", "after the update")

OPTIMIZERS = ("fused", "foreach")
MODES: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}, "gradient_clipping": 1.0},
    "fp16": {"fp16": {"enabled": True}, "gradient_clipping": 1.0},
}


class Marks:
    """The CPU seconds of the parts of one step."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._is_updated = False
        self._last = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self.spent.clear()
        self._is_updated, self._is_summed = False, False
        self._last = time.thread_time()

    def end(self) -> None:
        """End a step."""
        self._own()

    def _own(self) -> None:
        now = time.thread_time()
        part = "after the update" if self._is_updated else "sum to update" if self._is_summed else "before the sum"
        self.spent[part] += now - self._last
        self._last = now

    @contextmanager
    def foreign(self, part: str) -> Iterator[None]:
        """Run torch's code, whose time counts as `part`."""
        self._own()
        try:
            yield
        finally:
            now = time.thread_time()
            self.spent[part] += now - self._last
            self._last = now
            self._is_summed |= part == "the sum"
            self._is_updated |= part == "optimizer.step"

    def around(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, whose time counts as `part`."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.foreign(part):
                return call(*args, **kwargs)

        return counted


def _model(num_parameters: int) -> nn.Module:
    num_blocks, rest = divmod(num_parameters, 9)
    sizes = [9] * num_blocks + [rest] * (rest > 0)
    return nn.Sequential(*[nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(size)]) for size in sizes])


def measure(num_parameters: int, config: dict[str, Any], rounds: int, **of_optimizer: Any) -> dict[str, float]:
    """Return the milliseconds of each part of a step."""
    with fake_ranks(2):
        policy = zeroamp.policy_from_config(config)
        model = zeroamp.wrap_model(_model(num_parameters), policy, auto_wrap_policy={"Sequential"})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **of_optimizer)
        train = zeroamp.TrainStep(model, optimizer)
        batch = torch.ones(2, 4)
        marks, found = Marks(), []
        inner = torch.optim.AdamW.step
        patches = (
            mock.patch.object(torch.optim.AdamW, "step", marks.around("optimizer.step", inner)),
            mock.patch.object(torch, "_foreach_mul_", marks.around("clip's kernels", torch._foreach_mul_)),
            mock.patch.object(dist, "all_reduce", marks.around("the sum", dist.all_reduce)),
        )
        for patch in patches:
            patch.start()
        gc.disable()
        for index in range(rounds + WARM_UP):
            train.backward(model(batch).float().sum())
            marks.begin()
            train.step()
            marks.end()
            if index >= WARM_UP:
                found.append(dict(marks.spent))
            gc.collect()
        gc.enable()
        for patch in patches:
            patch.stop()
    return {part: median(each.get(part, 0.0) for each in found) * 1e3 for part in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[291, 1137])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["fused", "foreach"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    add_out(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for num_parameters in options.parameters:
        for mode in options.modes:
            for optimizer in options.optimizers:
                spent = measure(num_parameters, MODES[mode], options.rounds, **{optimizer: True})
                own = spent["sum to update"] + spent["after the update"]
                rows.append((num_parameters, mode, optimizer, *spent.values(), own))
    header = ("parameters", "mode", "AdamW", *PARTS, "own, after the sum")
    table = tabulate(rows, header, tablefmt="github", floatfmt=".2f", disable_numparse=[0])
    emit("step_python", ["Milliseconds of CPU time.", table], options.out)


if __name__ == "__main__":
    main()

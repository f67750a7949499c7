"""CPU time of each rank's threads in a step, by activity, as a ratio to a step without communication.

    torchrun --nproc-per-node 2 -m benchmarks.core_time [--model 3.7m] [--rounds 40] [--engines ...] [--out FOLDER]

A rank's main thread runs the forward, the backward and the optimizer. Its CPU time is split by the code that runs. The
time of a part does not include that of the parts inside it:

| part | where |
|---|---|
| model | forward and backward of the model, casts of autocast among them |
| around units | hooks of FSDP2 and zeroamp: copies into and out of flat buffers, sums over ranks |
| collectives | inside a call of torch.distributed, or waiting for one |
| optimizer | the update of the parameters |
| step | the rest of the optimizer step: norm, clipping, `zero_grad`, the report |
| gloo | all other threads of the process: they send and receive bytes, and add where a reduction of gloo adds |

Each value is a median over the rounds: CPU time divided by that of a whole step without communication of the same
round. "not running" is the wall time of a step minus the CPU time of the main thread: the time in which the main thread
waited for the other rank, or for a core that another thread used. Rounds are those of `benchmarks.step_time`.
"""

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import zeroamp
from benchmarks.peers import record
from benchmarks.peers.engine import Setup, UnavailableError, setup
from benchmarks.peers.engines import builder
from benchmarks.peers.options import Options
from benchmarks.peers.processes import start
from zeroamp.hooks._torch.fsdp import groups_of, units_of

BASE = "no communication"
ENGINES = (BASE, "zeroamp 3", "zeroamp 2", "FSDP2 bf16 reshard", "FSDP2 bf16 no reshard")
PARTS = ("model", "around units", "collectives", "optimizer", "step")
COLLECTIVES = (
    *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"),
    *("all_to_all_single", "all_reduce"),
)
"""Functions of torch.distributed. Some names exist in some versions only."""


class Parts:
    """The CPU seconds of the main thread by part. Those of a part do not include the parts inside it."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._stack = ["step"]
        self._since = time.thread_time()

    def _charge(self) -> None:
        now = time.thread_time()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """Charge the body to `part`."""
        self._charge()
        self._stack.append(part)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def of(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, charged to `part`."""

        @functools.wraps(function)
        def charged(*args: Any, **kwargs: Any) -> Any:
            with self.inside(part):
                return function(*args, **kwargs)

        return charged

    def taken(self) -> Counter[str]:
        """Return the seconds since the last call."""
        self._charge()
        taken, self.seconds = self.seconds, Counter()
        return taken


@contextmanager
def charged_torch(parts: Parts) -> Iterator[None]:
    """Charge functions of torch and zeroamp to parts of a step. Build and run the engines inside this context."""
    adam = import_module("torch.optim.adam")  # no attribute of torch.optim
    charged: list[tuple[Any, str, str]] = [
        *((dist, name, "collectives") for name in COLLECTIVES if hasattr(dist, name)),
        (dist.Work, "wait", "collectives"),
        (torch.Tensor, "backward", "model"),
        (adam, "adam", "optimizer"),
        (zeroamp.TrainStep, "step", "step"),
    ]
    with ExitStack() as stack:
        for owner, name, part in charged:
            stack.enter_context(patch.object(owner, name, parts.of(part, getattr(owner, name))))
        yield


def charge_model(model: nn.Module, parts: Parts) -> None:
    """Charge the hooks of a model to "around units"."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                hooks[key] = parts.of("around units", hook)
    for unit in units_of(model) if isinstance(model, FSDPModule) else ():
        state: Any = unit._get_fsdp_state()
        for owner, names in (
            (state, ("_pre_backward", "_root_post_backward_final_callback")),
            *((group, ("post_backward",)) for group in groups_of(state)),
        ):
            for name in names:
                if not hasattr(getattr(owner, name), "__wrapped__"):
                    setattr(owner, name, parts.of("around units", getattr(owner, name)))


def build(ready: Setup, name: str, parts: Parts) -> Callable[[], torch.Tensor]:
    """Return an engine's step, whose parts are charged to `parts`."""
    models: list[nn.Module] = []
    make = Setup.model

    def noted(self: Setup) -> Any:
        models.append(make(self))
        return models[-1]

    with patch.object(Setup, "model", noted):
        engine = builder(name)(ready)
    engine.step()  # FSDP2 makes its hooks' state in the first one
    charge_model(models[0], parts)
    models[0].forward = parts.of("model", models[0].forward)
    return engine.step


def measure(options: Options, device: torch.device) -> tuple[dict[str, list[Counter[str]]], dict[str, str]]:
    """Return engine -> CPU seconds of this rank by part in each round, and engine -> why it is not available."""
    parts = Parts()
    with charged_torch(parts):
        return _measure(options, setup(options, device, dist.get_rank()), parts)


def _measure(options: Options, ready: Setup, parts: Parts) -> tuple[dict[str, list[Counter[str]]], dict[str, str]]:
    steps, reasons = {}, {}
    for name in options.engines or ENGINES:
        try:
            steps[name] = build(ready, name, parts)
        except UnavailableError as error:
            reasons[name] = str(error)
    samples: dict[str, list[Counter[str]]] = {name: [] for name in steps}
    names = list(steps)
    for index in range(options.warm_up + options.rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            parts.taken()
            begin, cpu, of_thread = time.perf_counter(), time.process_time(), time.thread_time()
            steps[name]()
            found = parts.taken()
            main = time.thread_time() - of_thread
            found["gloo"] = time.process_time() - cpu - main
            found["not running"] = time.perf_counter() - begin - main
            if index >= options.warm_up:
                samples[name].append(found)
    return samples, reasons


def rows(samples: dict[str, list[Counter[str]]]) -> list[dict[str, str]]:
    """Return a row per engine: CPU time of each part, as a fraction of a step without communication."""
    columns = (*PARTS, "gloo")
    whole = [sum(found[part] for part in columns) for found in samples[BASE]]
    table = []
    for name, mine in samples.items():
        row = {"engine": name}
        for column in (*columns, "not running"):
            row[column] = f"{median(found[column] / all_ for found, all_ in zip(mine, whole, strict=True)):.3f}"
        total = [sum(found[part] for part in columns) for found in mine]
        row["all CPU time"] = f"{median(each / all_ for each, all_ in zip(total, whole, strict=True)):.3f}"
        table.append(row)
    return table


def main() -> None:
    options = Options.from_command_line(__doc__, rounds=40)
    device = start(options)
    samples, reasons = measure(options, device)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, samples)
    if dist.get_rank() == 0:
        tables = [f"Rank {rank}:\n\n{record.markdown(rows(of_rank))}" for rank, of_rank in enumerate(everyone)]
        explained = f"CPU time by part; 1 is all CPU time of the same rank's step of {BASE!r} in the same round."
        missing = [f"{name}: {reason}." for name, reason in reasons.items()]
        body = "\n\n".join([*record.head("benchmarks.core_time", options, device), explained, *tables, *missing])
        print(body)
        if options.out is not None:
            rounds = [{name: [dict(found) for found in mine] for name, mine in each.items()} for each in everyone]
            values = {"versions": record.versions(), "ranks": rounds}
            record.write(
                options.out, title=f"CPU time by part, {options.model}", body=body, name="rounds", values=values
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

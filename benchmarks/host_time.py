"""Host time of a forward and of a backward beside FSDP2 with equally many parameter groups, and hooks of a unit.

    python -m benchmarks.host_time [--layers 32] [--rounds 100] [--out FOLDER]

One process is rank 0 of --world-size fake ranks, whose collectives return at once. The shapes are tiny, so that the
time is that of Python and of dispatching ops. ZeRO-3 with the default config. Each engine has its own model. A round
takes one forward and one backward of each engine, in an order that rotates. The time is CPU time of the process, with
the garbage collector off. zeroamp's backward is `TrainStep.backward`. The optimizer step of a round is not timed.

FSDP2 has the units of zeroamp's plan. If zeroamp has a model-wide group beside them, the head is one more unit of
FSDP2. All engines then issue equally many all-gathers and reductions. The benchmark checks this.

Calls of Python functions are counted in another forward and backward, which is not timed. These counts do not depend on
the speed or load of the machine.
"""

import argparse
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zeroamp
from benchmarks.fake_ranks import fake_ranks
from benchmarks.peers import record
from benchmarks.peers.counting import Collectives
from benchmarks.peers.model import Decoder, Shape, build
from benchmarks.peers.timing import ratios
from zeroamp.hooks._torch.fsdp import groups_of, units_of

Pass = Literal["forward", "backward"]
Mode = Literal["bf16", "autocast"]
PASSES: tuple[Pass, ...] = ("forward", "backward")
CONFIGS: dict[Mode, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
BATCH, LENGTH = 1, 8
CPU = torch.device("cpu")
WARM_UP = 5  # rounds
ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(str((ROOT / folder).resolve()) + os.sep for folder in ("zeroamp", "hooks", "policies"))
FSDP2 = str(Path(sys.modules["torch.distributed.fsdp._fully_shard"].__path__[0])) + os.sep


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """A model, and the functions of it that are timed."""

    model: nn.Module
    forward: Callable[[], torch.Tensor]
    """Returns the loss."""
    backward: Callable[[torch.Tensor], None]
    end: Callable[[], None]
    """Takes the optimizer step and discards the gradients. Not timed."""


Seconds = dict[str, dict[Pass, list[float]]]
"""Engine -> the CPU seconds of each round."""


def shape_of(layers: int) -> Shape:
    return Shape(vocab=64, width=32, hidden=48, layers=layers, heads=4, kv_heads=4)


def new_model(layers: int) -> Decoder:
    return build(shape_of(layers), LENGTH, CPU, checkpointing=False, compiled=False)


def of_zeroamp(layers: int, mode: Mode, own: dict[str, Any] | None = None) -> Engine:
    """Return zeroamp's engine. `own`: the block "zeroamp" of its config."""
    config = {**CONFIGS[mode], "zero_optimization": {"stage": 3}, "zeroamp": own or {}}
    model = new_model(layers)
    zeroamp.wrap_model(model, zeroamp.policy_from_config(config))
    train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.0))
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    return Engine(model=model, forward=lambda: model(tokens), backward=train.backward, end=train.step)


def of_fsdp2(layers: int, mode: Mode) -> Engine:
    """Return FSDP2's engine, with the units of zeroamp's plan."""
    model = new_model(layers)
    plan = zeroamp.build_plan(model, zeroamp.policy_from_config({**CONFIGS[mode], "zero_optimization": {"stage": 3}}))
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for unit in plan.units:
        fully_shard(model.get_submodule(unit), mp_policy=precision)
    if len(plan.groups) > len(plan.units) + 1:  # the model-wide group
        fully_shard(model.head, mp_policy=precision, reshard_after_forward=False)
    fully_shard(model, mp_policy=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)

    def forward() -> torch.Tensor:
        autocast: AbstractContextManager[Any] = nullcontext()
        if mode == "autocast":
            autocast = torch.autocast(CPU.type, dtype=torch.bfloat16)
        with autocast:
            loss: torch.Tensor = model(tokens)
            return loss

    def end() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Engine(model=model, forward=forward, backward=torch.Tensor.backward, end=end)


def engines_of(layers: int) -> dict[str, Engine]:
    """Return all engines: for each mode zeroamp, and FSDP2 twice, which shows the noise of the method."""
    engines: dict[str, Engine] = {}
    for mode in CONFIGS:
        engines[f"FSDP2 {mode}"] = of_fsdp2(layers, mode)
        engines[f"FSDP2 {mode} again"] = of_fsdp2(layers, mode)
        engines[f"zeroamp {mode}"] = of_zeroamp(layers, mode)
    return engines


def base_of(name: str) -> str:
    """Return the engine that another engine's times are divided by."""
    return f"FSDP2 {name.split()[1]}"


def num_groups(engine: Engine) -> int:
    """Return the number of FSDP2's parameter groups."""
    return sum(len(groups_of(unit._get_fsdp_state())) for unit in units_of(engine.model))


def num_collectives(engine: Engine) -> Counter[str]:
    """Return how many all-gathers and how many reductions a forward and a backward issue."""
    with Collectives() as collectives:
        engine.backward(engine.forward())
    engine.end()
    found: Counter[str] = Counter()
    for (kind, _), (calls, _) in collectives.totals().items():
        found["all_gather" if kind == "all_gather" else "reduction"] += calls
    return found


def timed(engine: Engine) -> dict[Pass, float]:
    """Return the CPU seconds of one forward and one backward."""
    begin = time.process_time()
    loss = engine.forward()
    between = time.process_time()
    engine.backward(loss)
    return {"forward": between - begin, "backward": time.process_time() - between}


def measure(engines: dict[str, Engine], num_rounds: int, warm_up: int = WARM_UP) -> Seconds:
    """Return the seconds of every round after the first `warm_up`."""
    seconds: Seconds = {name: {which: [] for which in PASSES} for name in engines}
    names = list(engines)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for index in range(warm_up + num_rounds):
            turn = index % len(names)
            for name in names[turn:] + names[:turn]:
                sample = timed(engines[name])
                engines[name].end()
                if index >= warm_up:
                    for which in PASSES:
                        seconds[name][which].append(sample[which])
            gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return seconds


@contextmanager
def calls() -> Iterator[Counter[tuple[str, str]]]:
    """Yield a Counter that fills up inside: (file, function) -> calls of the Python function in this thread."""
    found: Counter[tuple[str, str]] = Counter()

    def count(frame: Any, event: str, _argument: object) -> None:
        if event == "call":
            found[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield found
    finally:
        sys.setprofile(before)


def calls_of(engine: Engine) -> dict[Pass, Counter[tuple[str, str]]]:
    """Return the Python functions that a forward and a backward call, and how often."""
    with calls() as forward:
        loss = engine.forward()
    with calls() as backward:
        engine.backward(loss)
    engine.end()
    return {"forward": forward, "backward": backward}


def is_ours(function: tuple[str, str]) -> bool:
    return function[0].startswith(OURS)


def hooks_of_unit(engine: Engine) -> tuple[int, int]:
    """Return how many forward hooks and forward pre-hooks are on one block, and on the modules inside it."""
    blocks = engine.model.get_submodule("blocks")
    block = blocks.get_submodule(str(len(list(blocks.children())) // 2))
    own, *inside = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in block.modules()]
    return own, sum(inside)


def time_rows(seconds: Seconds) -> list[dict[str, str]]:
    """Return a row per engine: median of each pass, and its ratios to the base."""
    rows = []
    for name, mine in seconds.items():
        row = {"engine": name}
        for which in PASSES:
            base = seconds[base_of(name)][which]
            spread = ratios(mine[which], base)
            row[f"{which}, ms"] = f"{median(mine[which]) * 1e3:.2f}"
            row[f"{which}, ratio of medians"] = f"{median(mine[which]) / median(base):.3f}"
            row[f"{which}, paired ratio"] = f"{spread.middle:.3f} ({spread.lower:.3f} to {spread.upper:.3f})"
        rows.append(row)
    return rows


def hook_rows(engines: dict[str, Engine], layers: int) -> list[dict[str, str]]:
    """Return a row per engine: hooks of a unit, and calls of Python functions per unit."""
    rows = []
    for name, engine in engines.items():
        if name.endswith("again"):
            continue
        own, inside = hooks_of_unit(engine)
        found = calls_of(engine)
        row = {"engine": name, "hooks on a unit": str(own), "on modules inside": str(inside)}
        for which in PASSES:
            of_all, of_zeroamp, of_fsdp2 = (
                sum(count for function, count in found[which].items() if matches(function)) / layers
                for matches in (lambda _: True, is_ours, lambda function: function[0].startswith(FSDP2))
            )
            row[f"{which}: all"] = f"{of_all:.0f}"
            row[f"{which}: FSDP2's"] = f"{of_fsdp2:.1f}"
            row[f"{which}: zeroamp's"] = f"{of_zeroamp:.1f}"
        rows.append(row)
    return rows


def check(engines: dict[str, Engine]) -> None:
    """Raise AssertionError unless zeroamp and FSDP2 have equally many groups, all-gathers and reductions."""
    for name, engine in engines.items():
        base = engines[base_of(name)]
        mine, other = ((num_groups(each), num_collectives(each)) for each in (engine, base))
        if mine != other:
            raise AssertionError(f"{name} has (groups, collectives) {mine}, but {base_of(name)} has {other}")


def report(engines: dict[str, Engine], seconds: Seconds, layers: int) -> str:
    """Return the Markdown of a measurement, below its title."""
    groups = {name: num_groups(engine) for name, engine in engines.items() if name.startswith("zeroamp")}
    return "\n\n".join(
        [
            f"{layers} layers of width {shape_of(layers).width}, {BATCH} sequence of {LENGTH} tokens, ZeRO-3. "
            f"Parameter groups: {', '.join(f'{name} {count}' for name, count in groups.items())}; FSDP2 as many.",
            "CPU time of the process. Ratios to FSDP2 of the same mode: of the medians, and the median and quartiles "
            "of the ratios of each round.",
            record.markdown(time_rows(seconds)),
            "Hooks of a unit, and Python functions called per unit.",
            record.markdown(hook_rows(engines, layers)),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--world-size", type=int, default=2, help="fake ranks")
    parser.add_argument("--out", type=Path, help="folder to write the record into")
    options = parser.parse_args()
    with fake_ranks(options.world_size):
        engines = engines_of(options.layers)
        check(engines)
        seconds = measure(engines, options.rounds)
        found = ", ".join(f"{name} {version}" for name, version in record.versions().items())
        command, hardware = record.command("benchmarks.host_time"), record.hardware(CPU)
        head = f"`{command}`\n\n{hardware}. {found}. {options.rounds} rounds."
        body = f"{head}\n\n{report(engines, seconds, options.layers)}"
    print(body)
    if options.out is not None:
        values = {name: {w: [round(s, 7) for s in mine[w]] for w in PASSES} for name, mine in seconds.items()}
        title = "Host time of forward and backward beside FSDP2"
        record.write(options.out, title=title, body=body, name="rounds", values={"seconds": values})


if __name__ == "__main__":
    main()

"""Time of one step by number of layers, to check that the time per layer is constant.

    OMP_NUM_THREADS=1 python -m benchmarks.growth [--layers 4 8 16 32 64] [--rounds 15] [--out FOLDER]

Layers have width 32, batches two sequences of four tokens, and collectives return at once (`benchmarks/fake_ranks.py`),
so the time is that of Python and the dispatcher. Each round takes one step of every model of both engines, in an order
that rotates. The output is the median processor time over the rounds, the line through the medians, and the residuals.

    zeroamp   ZeRO-3, bf16 autocast: TrainStep, with its gradient norm and its collective
    FSDP2     fully_shard of every block and the root, MixedPrecisionPolicy(bf16, bf16): backward, step, zero_grad
"""

import argparse
import gc
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from tabulate import tabulate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zeroamp
from benchmarks.fake_ranks import fake_ranks
from benchmarks.output import add_out, emit
from tests.models.small import VOCAB, Llama

WARM_UP = 3  # rounds
NUM_RANKS = 8
CONFIG = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 3}}
TOKENS = torch.arange(8).view(2, 4) % VOCAB

Step = Callable[[], None]


def zeroamp_step(num_layers: int) -> Step:
    model = Llama(tied=False, num_blocks=num_layers)
    zeroamp.wrap_model(model, zeroamp.policy_from_config(CONFIG))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters()))

    def step() -> None:
        train.backward(model(TOKENS))
        train.step()

    return step


def fsdp2_step(num_layers: int) -> Step:
    model = Llama(tied=False, num_blocks=num_layers)
    mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=mp_policy)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


ENGINES = {"zeroamp": zeroamp_step, "FSDP2": fsdp2_step}


def measured(steps: dict[tuple[str, int], Step], num_rounds: int) -> dict[tuple[str, int], float]:
    """Return the median processor time of a step of each, in milliseconds."""
    times: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    keys = list(steps)
    for index in range(num_rounds + WARM_UP):
        turn = index % len(keys)
        gc.collect()  # between rounds, so that it does not run inside of steps
        for key in keys[turn:] + keys[:turn]:
            begin = time.process_time()
            steps[key]()
            times[key].append((time.process_time() - begin) * 1e3)
    return {key: median(values[WARM_UP:]) for key, values in times.items()}


def line(layers: list[int], times: list[float]) -> tuple[float, float, list[float]]:
    """Return slope, intercept and residuals of the least-squares line through the times.

    The weights are 1 / time, since noise is proportional to the time of a step.
    """
    slope, intercept = np.polyfit(layers, times, 1, w=1 / np.array(times))
    residuals = np.array(times) - (slope * np.array(layers) + intercept)
    return float(slope), float(intercept), residuals.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=15)
    add_out(parser)
    options = parser.parse_args()
    with fake_ranks(NUM_RANKS):
        times = measured({(name, n): make(n) for name, make in ENGINES.items() for n in options.layers}, options.rounds)
    rows: dict[int, dict[str, object]] = {n: {"layers": n} for n in options.layers}
    fits = []
    for name in ENGINES:
        of_engine = [times[name, n] for n in options.layers]
        slope, intercept, residuals = line(options.layers, of_engine)
        for n, milliseconds, residual in zip(options.layers, of_engine, residuals, strict=True):
            rows[n] |= {
                f"{name} ms": f"{milliseconds:.2f}",
                f"{name} ms per layer": f"{(milliseconds - intercept) / n:.3f}",
                f"{name} off the line": f"{residual / milliseconds:+.1%}",
            }
        largest = max(abs(residual) / milliseconds for residual, milliseconds in zip(residuals, of_engine, strict=True))
        fits.append(
            {
                "engine": name,
                "ms per layer": f"{slope:.3f}",
                "ms beside": f"{intercept:.2f}",
                "largest residual": f"{largest:.1%}",
            }
        )
    parts = [
        tabulate(table, headers="keys", tablefmt="github", disable_numparse=True) for table in (rows.values(), fits)
    ]
    emit("growth", parts, options.out)


if __name__ == "__main__":
    main()

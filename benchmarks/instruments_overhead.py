"""Step time with each instrument, as a ratio to a step without, from paired alternating runs. Prints a table.

    python -m benchmarks.instruments_overhead [--ranks 2] [--rounds 40] [--width 512] [--device cpu] [--values FILE]

Each variant is a model of its own, with the same weights and batches, in the same rank processes. A round takes one
step of each, in a different random order, so that the order has no effect. Ratios are those of two steps of one round,
so load on the machine that lasts longer than a round affects both. "none again" repeats "none": its difference is
noise. The rank's CPU time is measured beside the wall time. Other work on the machine disturbs it less.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.profiler import profile

import zeroamp
from tests.processes.ranks import Ranks

Clock = Literal["passed", "cpu"]
Round = dict[str, dict[Clock, float]]
"""Variant -> seconds of its step."""

NUM_WARMUP_ROUNDS = 3
VOCAB = 1024


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run: the block "zeroamp" of the config, and a context around each step, whose making is not timed."""

    zeroamp: dict[str, Any] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    device_type: str | None = None
    """Device type that it needs. None: any."""


NONE = {"ranges": "off", "count_traffic": False}
BASELINE = "none"
VARIANTS = {
    BASELINE: Variant(zeroamp=NONE),
    "none again": Variant(zeroamp=NONE),
    "the default": Variant(),
    "ranges": Variant(zeroamp={**NONE, "ranges": "profiler"}),
    "ranges to NVTX": Variant(zeroamp={**NONE, "ranges": "nvtx"}, device_type="cuda"),
    "traffic": Variant(zeroamp={**NONE, "count_traffic": True}),
    "torch.profiler": Variant(zeroamp=NONE, around=profile),
    "torch.profiler, all of ours": Variant(around=profile),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command line, but for the output file."""

    ranks: int
    rounds: int
    stage: int
    width: int
    blocks: int
    length: int
    batch: int
    device: str


class LanguageModel(nn.Module):
    """A decoder of plain torch layers that returns its loss."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, width // 64, dropout=0.0, batch_first=True)
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of `tokens` (batch, length), 0-D fp32."""
        logits = self.head(self.blocks(self.embed(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def _train_step(options: Options, variant: Variant) -> zeroamp.TrainStep:
    config = {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": options.stage},
        "gradient_clipping": 1.0,
        "zeroamp": variant.zeroamp,
    }
    torch.manual_seed(0)
    model = LanguageModel(options.width, options.blocks).to(options.device)
    zeroamp.wrap_model(model, zeroamp.policy_from_config(config))
    return zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-4))


def _timed_step(train: zeroamp.TrainStep, tokens: torch.Tensor, variant: Variant) -> dict[Clock, float]:
    """Return the seconds of one step on this rank, by both clocks. All ranks begin it together."""
    synchronize = torch.accelerator.synchronize if tokens.device.type != "cpu" else lambda: None
    with variant.around():
        synchronize()
        dist.barrier()
        started, cpu_started = time.perf_counter(), time.process_time()
        train.backward(train.model(tokens))
        train.step()
        synchronize()
        return {"passed": time.perf_counter() - started, "cpu": time.process_time() - cpu_started}


def variants_on(device_type: str) -> dict[str, Variant]:
    return {name: variant for name, variant in VARIANTS.items() if variant.device_type in (None, device_type)}


_state: dict[str, tuple[Variant, zeroamp.TrainStep]] = {}
"""State of a rank between calls: variant -> what `prepare` built."""


def prepare(options: Options) -> None:
    """Build every variant. Every rank calls it."""
    _state.update({name: (v, _train_step(options, v)) for name, v in variants_on(options.device).items()})


def one_round(options: Options, index: int) -> Round:
    """Return the seconds of one step of each variant. Every rank calls it, with the same round `index`."""
    generator = torch.Generator().manual_seed(index * options.ranks + dist.get_rank())
    tokens = torch.randint(0, VOCAB, (options.batch, options.length), generator=generator).to(options.device)
    order = random.Random(index).sample(list(_state), len(_state))  # the same on every rank
    runs = {name: _state[name] for name in order}
    return {name: _timed_step(train, tokens, variant) for name, (variant, train) in runs.items()}


def rows(rounds: list[Round], clock: Clock) -> list[list[str]]:
    """Return per variant: median step, and median and quartiles of the paired ratio to the baseline, less one."""
    found = []
    for name in sorted(rounds[0], key=list(VARIANTS).index):
        ratios = [times[name][clock] / times[BASELINE][clock] - 1 for times in rounds]
        low, median, high = (f"{100 * value:+.2f} %" for value in statistics.quantiles(ratios, n=4))
        step_ms = 1000 * statistics.median(times[name][clock] for times in rounds)
        found.append([name, f"{step_ms:.1f}", median, f"{low} … {high}"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="on cuda each needs a GPU")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--values", type=Path, help="file for every value, as JSON")
    arguments = vars(parser.parse_args())
    values: Path | None = arguments.pop("values")
    options = Options(**arguments)

    ranks = Ranks(options.ranks, options.device)
    try:
        ranks.run(prepare, options)
        rounds = [ranks.run(one_round, options, index) for index in range(NUM_WARMUP_ROUNDS + options.rounds)]
    finally:
        ranks.stop()
    by_rank = [[of_ranks[rank] for of_ranks in rounds[NUM_WARMUP_ROUNDS:]] for rank in range(options.ranks)]
    print(f"torch {torch.__version__}, {options}")
    titles: dict[Clock, str] = {"passed": "time passed", "cpu": "CPU time of the rank"}
    for clock, title in titles.items():
        headers = [f"{title}, rank 0", "median step, ms", "median ratio - 1", "quartiles"]
        print("\n" + tabulate(rows(by_rank[0], clock), headers=headers))
    if values is not None:
        values.write_text(json.dumps({"torch": torch.__version__, "options": asdict(options), "seconds": by_rank}))


if __name__ == "__main__":
    main()

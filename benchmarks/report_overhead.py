"""The share of a step that RunReport and the config's monitors take: paired steps, in the same processes.

    torchrun --nproc-per-node 2 -m benchmarks.report_overhead [--rounds 100] [--width 384] [--layers 6]

Each variant has a model of its own, with equal weights. A round takes one step of each, in an order that rotates, so
that other load on the machine affects all equally. The output is the ratio to the step without instruments of the same
round: median and quartiles over the rounds, without the first five. Ratios are those of wall time, and of the CPU time
of the first rank's process, which other work on the machine disturbs less.

    off       no instrument
    off again the same once more, which shows the noise of the method
    default   RunReport: times, exposed communication, traffic, tokens, memory; a flushed JSON line; warnings
    all       also csv_monitor, tensorboard (where it is installed), wall_clock_breakdown, progress in lines, and the
              ranks' exchange every 10 steps
"""

import argparse
import importlib.util
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import nn

import zeroamp

WARM_UP = 5  # rounds
VOCAB = 1024


class Model(nn.Module):
    """A small transformer that returns a loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        layer = nn.TransformerEncoderLayer(width, nhead=8, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_layers=layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of int64 tokens [sequences, length], each predicted from itself."""
        return nn.functional.cross_entropy(self.head(self.blocks(self.embed(tokens))).flatten(0, 1), tokens.flatten())


def variant(name: str, options: argparse.Namespace, folder: str) -> Callable[[], None]:
    """Return a function that takes one step."""
    cfg = {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": options.stage},
        "gradient_clipping": 1.0,
    }
    if name == "all":
        cfg |= {"csv_monitor": {"enabled": True, "output_path": folder}, "wall_clock_breakdown": True}
        if importlib.util.find_spec("tensorboard") is not None:
            cfg |= {"tensorboard": {"enabled": True, "output_path": folder}}
    torch.manual_seed(0)
    model = zeroamp.wrap_model(Model(options.width, options.layers), zeroamp.policy_from_config(cfg))
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    if name == "default":
        zeroamp.RunReport(train, f"{folder}/default.jsonl")
    if name == "all":
        zeroamp.RunReport(
            train,
            f"{folder}/all.jsonl",
            num_steps=options.rounds,
            flops_per_step=1e12,
            peak_flops=1e12,
            steps_per_check=10,
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.randint(0, VOCAB, (options.batch, options.length), device=device)

    def step() -> None:
        train.backward(model(tokens))
        train.step()

    return step


def measured(steps: dict[str, Callable[[], None]], num_rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return (seconds, CPU seconds of this process) of every variant in every round."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    names = list(steps)
    for index in range(num_rounds + WARM_UP):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            begin, cpu_begin = time.perf_counter(), time.process_time()
            steps[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append((time.perf_counter() - begin, time.process_time() - cpu_begin))
    return {name: values[WARM_UP:] for name, values in seconds.items()}


def described(values: Sequence[float], bases: Sequence[float]) -> str:
    """Return the median, and median and quartiles of the ratios to `bases`."""
    lower, middle, upper = quantiles([value / base - 1 for value, base in zip(values, bases, strict=True)], n=4)
    return f"{median(values) * 1e3:8.2f} ms, {middle:+.2%} ({lower:+.2%} to {upper:+.2%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--stage", type=int, default=3)
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    logging.getLogger("zeroamp").addHandler(logging.NullHandler())
    logging.getLogger("zeroamp").setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "progress").open("w") as progress:
        with redirect_stdout(progress):
            steps = {name: variant(name, options, folder) for name in ("off", "off again", "default", "all")}
            seconds = measured(steps, options.rounds)
        if dist.get_rank() == 0:
            print(f"torch {torch.__version__}, {options}, {dist.get_world_size()} ranks")
            for name, values in seconds.items():
                of_time, of_cpu = (
                    described(mine, base)
                    for mine, base in zip(zip(*values, strict=True), zip(*seconds["off"], strict=True), strict=True)
                )
                print(f"{name:10} step {of_time}; CPU {of_cpu}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

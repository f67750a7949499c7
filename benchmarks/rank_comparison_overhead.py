"""The share of a step that the comparison of ranks takes: paired steps, in the same processes.

    torchrun --nproc-per-node 2 -m benchmarks.rank_comparison_overhead [--rounds 200] [--width 256] [--layers 6]

Each variant has a model of its own, with equal weights. A round takes one step of each, in an order that rotates, so
that other load on the machine affects all equally. The output is the ratio to the step without the comparison of the
same round: median and quartiles over the rounds, without the first ten. Ratios are those of wall time, and of the CPU
time of the first rank's main thread, which waiting and other work on the machine disturb less.

    off        no number in the step's all-reduce, no listener
    off again  the same once more, which shows the noise of the method
    compared   the default of a TrainStep on several ranks
"""

import argparse
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from benchmarks.output import add_out, emit
from zeroamp.wrapping.state import wrap_state

WARM_UP = 10  # rounds


def variant(name: str, options: argparse.Namespace) -> Callable[[], None]:
    """Return a function that takes one step."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(options.width, options.width), nn.GELU()) for _ in range(options.layers)]
    config = {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": options.stage},
        "gradient_clipping": 1.0,
    }
    policy = zeroamp.policy_from_config(config)
    model = zeroamp.wrap_model(nn.Sequential(*layers), policy, auto_wrap_policy={"Linear"})
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    if name != "compared":
        state = wrap_state(model)
        train.callbacks.agreement = train._agreement = None
        state.listeners.remove(state.issued)
        state.issued = None
    batch = torch.randn(8, options.width)

    def step() -> None:
        train.backward(model(batch).float().square().mean())
        train.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--stage", type=int, default=3)
    add_out(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names = ["off", "off again", "compared"]
    steps = {name: variant(name, options) for name in names}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for index in range(options.rounds + WARM_UP):
        for name in names[index % 3 :] + names[: index % 3]:
            dist.barrier()
            begun_s, cpu_s = time.perf_counter(), time.thread_time()
            steps[name]()
            times[name].append((time.perf_counter() - begun_s, time.thread_time() - cpu_s))
    if dist.get_rank() == 0:
        rows = ["| variant | ms | time / off | CPU ms | CPU time / off |", "|---|---|---|---|---|"]
        for name in names:
            cells = []
            for column in range(2):
                own, off = ([pair[column] for pair in times[which][WARM_UP:]] for which in (name, "off"))
                low, _, high = quantiles([a / b for a, b in zip(own, off, strict=True)], n=4)
                ratio = median(a / b for a, b in zip(own, off, strict=True))
                cells += [f"{median(own) * 1e3:.3f}", f"{ratio:.3f} ({low:.3f} to {high:.3f})"]
            rows.append(f"| {name} | {' | '.join(cells)} |")
        emit("rank_comparison_overhead", ["\n".join(rows)], options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Two-level collectives on two hosts of four ranks over a limited cable: bytes, bits and step times.

    python -m benchmarks.two_level [--rounds 10] [--rate 200mbit] [--out FOLDER]

Two network namespaces on this machine, a veth between them, `tbf` on both ends. As root. Bytes are the counter of the
first host's end; "formula" is that of `zeroamp/two_level/nodes.py` for m = 2 nodes of g = 4 ranks. Errors are relative
2-norms against fp64. Times are ratios of alternating runs of the two schemes: median and quartiles.
"""

import argparse
import hashlib
import multiprocessing as mp
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zeroamp
from benchmarks.output import add_out, emit
from benchmarks.two_hosts import INTERFACE, Hosts, two_hosts
from zeroamp.hooks.collectives.gradient_reduction import sum_over_ranks
from zeroamp.two_level.nodes import Nodes

NUM_NODES, PER_NODE = 2, 4
NUM_RANKS = NUM_NODES * PER_NODE
NUMEL = 2 * 2**20
"""Elements of a reduction's input: 4 MiB of bf16."""
FORMULAS = {"flat": 2.0, "fp32": 1.0, "bf16": 0.5}
"""Scheme -> bytes that leave a host, as a multiple of the bytes of the bf16 gradients."""
WIDTH, NUM_BLOCKS = 512, 4


def _sent() -> int:
    """Return the bytes that this host has sent over the cable."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise AssertionError(f"expected the interface {INTERFACE}")


def _written_out(rows: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in the order of the tree, row by row: a reference that shares no code with the library."""
    if len(rows) == 1:
        return rows[0].float()
    left = 1
    while 2 * left < len(rows):
        left *= 2
    return _written_out(rows[:left]) + _written_out(rows[left:])


def _gradient(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)


def _reductions(rounds: int) -> list[list[Any]]:
    """Rows: scheme, bytes that left the host / bytes of the gradients, formula, their ratio, error, bits, time."""
    rank = dist.get_rank()
    node, place = divmod(rank, PER_NODE)
    members = (range(node * PER_NODE, (node + 1) * PER_NODE), range(place, NUM_RANKS, PER_NODE))
    inside, across = (dist.new_group(list(ranks), use_local_synchronization=True) for ranks in members)
    own = slice(rank * NUMEL // NUM_RANKS, (rank + 1) * NUMEL // NUM_RANKS)
    chunks = [_gradient(each)[own] for each in range(NUM_RANKS)]
    tree, exact = _written_out(chunks) / NUM_RANKS, sum(chunk.double() for chunk in chunks) / NUM_RANKS
    num_bytes: dict[str, int] = dict.fromkeys(FORMULAS, 0)
    seconds: dict[str, list[float]] = {scheme: [] for scheme in FORMULAS}
    found: dict[str, torch.Tensor] = {}
    for number in range(rounds + 1):
        for scheme in FORMULAS:
            nodes = None if scheme == "flat" else Nodes(inside=inside, across=across, partials=scheme)  # type: ignore[arg-type]
            sent, total = _gradient(rank), torch.empty(NUMEL // NUM_RANKS)
            received = torch.empty_like(sent)
            before = _sent()  # before the barrier: another rank of this host may leave it first, and send
            dist.barrier()
            begin = time.perf_counter()
            sum_over_ranks(sent, received, total, NUM_RANKS, dist.group.WORLD, nodes)  # type: ignore[arg-type]
            dist.barrier()
            if number:  # the first round connects
                seconds[scheme].append(time.perf_counter() - begin)
                num_bytes[scheme] += _sent() - before
            found[scheme] = total
    rows = []
    for scheme, formula in FORMULAS.items():
        part = num_bytes[scheme] / rounds / (2 * NUMEL)
        error = float((found[scheme].double() - exact).norm() / exact.norm())
        ratios = [own / flat for own, flat in zip(seconds[scheme], seconds["flat"], strict=True)]
        bits = "the tree's" if torch.equal(found[scheme], tree) else "others"
        rows.append([scheme, f"{part:.3f}", formula, f"{part / formula:.3f}", f"{error:.1e}", bits, _spread(ratios)])
    return rows


def _spread(ratios: list[float]) -> str:
    low, _, high = quantiles(ratios, n=4)
    return f"{median(ratios):.2f} ({low:.2f}-{high:.2f})"


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class _Training:
    """One wrapped model and its optimizer."""

    def __init__(self, stage: int, per_node: int | str, mesh_shape: tuple[int, int] | None = None) -> None:
        config = {
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
            "zero_optimization": {"stage": stage},
            "zeroamp": {"ranks_per_node": per_node},
        }
        torch.manual_seed(0)
        mesh = mesh_shape and init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
        model = nn.Sequential(*[_Block() for _ in range(NUM_BLOCKS)], nn.Linear(WIDTH, 1))
        self.model = zeroamp.wrap_model(model, zeroamp.policy_from_config(config), mesh, {_Block})
        self.train = zeroamp.TrainStep(self.model, torch.optim.AdamW(self.model.parameters(), lr=1e-3))  # type: ignore[arg-type]
        self.num_steps = 0

    def step(self) -> None:
        """Take one optimizer step on inputs of this rank."""
        seed = self.num_steps * NUM_RANKS + dist.get_rank()
        inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed))
        self.train.backward(self.model(inputs).float().square().mean())
        self.train.step()
        self.num_steps += 1

    def digest(self) -> str:
        """Return a hash of all bits of the parameters."""
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            found.update(whole.detach().numpy().tobytes())
        return found.hexdigest()[:12]


def _step_times(rounds: int) -> list[Any]:
    """A row: the ratio of step times and of bytes that left the host, two-level to flat, at stage 3."""
    flat, two_level = _Training(3, "off"), _Training(3, PER_NODE)
    ratios, num_bytes = [], [0, 0]
    for number in range(rounds + 1):
        seconds = []
        for index, training in enumerate((flat, two_level)):
            before = _sent()
            dist.barrier()
            begin = time.perf_counter()
            training.step()
            dist.barrier()
            seconds.append(time.perf_counter() - begin)
            if number:
                num_bytes[index] += _sent() - before
        if number:
            ratios.append(seconds[1] / seconds[0])
    return [f"{num_bytes[1] / num_bytes[0]:.2f}", _spread(ratios), flat.digest() == two_level.digest()]


def _digests() -> Iterator[list[str]]:
    """Rows: layout, then the parameters after three steps, as a hash."""
    layouts: list[tuple[str, int, int | str, tuple[int, int] | None]] = [
        *((f"stage {stage}, 1 x 8, flat", stage, "off", None) for stage in range(4)),
        *((f"stage {stage}, 2 nodes x 4", stage, 4, None) for stage in range(4)),
        ("stage 3, 4 nodes x 2", 3, 2, None),
        ("stage 3, HSDP 2 x 4, 2 nodes x 4", 3, 4, (2, 4)),
        ("stage 3, HSDP 4 x 2, 2 nodes x 4", 3, 4, (4, 2)),
    ]
    for name, stage, per_node, shape in layouts:
        training = _Training(stage, per_node, shape)
        for _ in range(3):
            training.step()
        yield [name, training.digest()]


def _serve(rank: int, hosts: Hosts, rounds: int, answers: Any) -> None:
    torch.set_num_threads(1)
    hosts.enter(rank // PER_NODE)
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=hosts.init_method, rank=rank, world_size=NUM_RANKS, timeout=timeout)
    reductions, steps, digests = _reductions(rounds), _step_times(rounds), list(_digests())
    if rank == 0:
        answers.put((reductions, steps, digests))
    dist.barrier()
    dist.destroy_process_group()


def _over_the_cable(rounds: int, rate: str) -> Any:
    context = mp.get_context("spawn")
    answers = context.Queue()
    with two_hosts() as hosts:
        limit = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "400ms")
        for host in range(NUM_NODES):
            hosts.run(host, "tc", "qdisc", "add", "dev", INTERFACE, *limit)
        ranks = [
            context.Process(target=_serve, args=(rank, hosts, rounds, answers), daemon=True)
            for rank in range(NUM_RANKS)
        ]
        for process in ranks:
            process.start()
        try:
            return answers.get(timeout=500)
        finally:
            for process in ranks:
                process.join(timeout=10)
                process.kill()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rate", default="200mbit", help="of the cable, as tc has it")
    add_out(parser)
    arguments = parser.parse_args()
    reductions, steps, digests = _over_the_cable(arguments.rounds, arguments.rate)
    headers = ["scheme", "bytes / B", "formula", "ratio", "error", "bits", "time / flat"]
    parts = [
        f"One reduction, B = {2 * NUMEL} bytes of bf16 gradients:",
        tabulate(reductions, headers=headers, tablefmt="github"),
        "One optimizer step at stage 3, two levels as a multiple of flat:",
        tabulate([steps], headers=["bytes", "time", "same bits"], tablefmt="github"),
        "Parameters after three steps:",
        tabulate(digests, headers=["layout", "sha256"], tablefmt="github"),
    ]
    emit("two_level", parts, arguments.out)


if __name__ == "__main__":
    main()

"""Counts of what grows with the ranks: process groups, sockets, bytes of objects in a save, host collectives of a step.

    OMP_NUM_THREADS=1 python -m benchmarks.counts [--fake 8 64 1024 16384] [--ranks 16] [--out FOLDER]

Process groups and the collectives of a step are counted in one process, as rank 0 of --fake fake ranks
(`benchmarks/fake_ranks.py`). Sockets, bytes and times of exchanges are those of real ranks on this machine, with gloo.
To count for an earlier version of zeroamp, copy this file there.
"""

import argparse
import os
import pickle
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed import device_mesh

import zeroamp
from benchmarks.fake_ranks import fake_ranks
from benchmarks.output import add_out, emit
from tests.models.small import VOCAB, Llama
from tests.processes.ranks import Ranks
from zeroamp.wrapping.rank_group import RankGroup
from zeroamp.wrapping.state import wrap_state

try:
    from zeroamp.wrapping.rank_tree import RankTree
except ImportError:  # an earlier version
    RankTree = None  # type: ignore[assignment,misc]

PARTITION = 8  # ranks of a secondary partition
NUM_STEPS = 102
TOKENS = torch.arange(8).view(2, 4) % VOCAB
CONFIG = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 3}}
GATHERS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


def model_of(num_blocks: int, **keys: Any) -> torch.nn.Module:
    model = Llama(tied=False, num_blocks=num_blocks)
    config = {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], **keys}}
    return zeroamp.wrap_model(model, zeroamp.policy_from_config(config))


@contextmanager
def counted_groups() -> Iterator[list[Any]]:
    """Count the calls of new_group. Under fake ranks all groups are fake, those of gloo too."""
    made, real = [], dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        if dist.get_backend() == "fake":
            kwargs.pop("backend", None)
        return real(*args, **kwargs)

    with mock.patch.object(dist, "new_group", new_group), mock.patch.object(device_mesh, "new_group", new_group):
        yield made


def groups_made(num_ranks: int, num_blocks: int, **keys: Any) -> int:
    with fake_ranks(num_ranks), counted_groups() as made:
        model_of(num_blocks, **keys)
        return len(made)


@contextmanager
def answering(num_ranks: int) -> Iterator[Counter[str]]:
    """Count exchanges on the host under fake ranks. Each exchange returns this rank's value for all ranks."""
    calls: Counter[str] = Counter()

    def gathered(results: list[Any], value: Any, **_: Any) -> None:
        calls["all_gather_object"] += 1
        results[:] = [value] * num_ranks

    real = dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        calls["all_reduce"] += 1
        return real(*args, **kwargs)

    def tree(name: str, answer: Any) -> Any:
        def call(_: Any, value: Any = None) -> Any:
            calls["tree"] += 1
            return answer(value)

        return nullcontext() if RankTree is None else mock.patch.object(RankTree, name, call)

    of_all = lambda value: [value] * num_ranks  # noqa: E731
    with (
        mock.patch.object(dist, "all_gather_object", gathered),
        mock.patch.object(dist, "all_reduce", all_reduce),
        tree("max", lambda values: values),
        tree("all_gather", of_all),
        tree("gather", of_all),
        tree("broadcast", lambda value: value),
    ):
        yield calls


def collectives_of_steps(num_ranks: int, folder: str) -> tuple[int, int]:
    """The all-reduces and other exchanges of 102 steps with a preemption, a pending save and a RunReport."""
    timeout_of = mock.patch("zeroamp.wrapping.rank_group.timeout_of", return_value=timedelta(minutes=1))
    with fake_ranks(num_ranks), counted_groups(), timeout_of, answering(num_ranks) as calls:
        model = model_of(1)
        train = zeroamp.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with zeroamp.RunReport(train, f"{folder}/{num_ranks}.jsonl"), zeroamp.Preemption(model) as preemption:
            pending: Future[Any] = Future()
            train.callbacks.append(train.saving)
            if RankTree is None:
                train.saving.begin(pending, RankGroup.for_signals(wrap_state(model).mesh))
            else:
                train.saving.begin(pending)
            calls.clear()
            for _ in range(NUM_STEPS):
                train.backward(model(TOKENS))
                train.step()
                preemption.is_requested()
            return calls["all_reduce"] - NUM_STEPS, calls["all_gather_object"] + calls["tree"]


def num_sockets() -> int:
    found = 0
    for file in os.scandir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found += os.readlink(file.path).startswith("socket:")
    return found


class Bytes:
    """Counts the bytes of objects that this rank sends, once each, and receives."""

    def __init__(self, ranks: RankGroup) -> None:
        self.sent = self.received = 0
        self._tree = None if RankTree is None else ranks.tree
        self._before = 0 if self._tree is None else self._tree.num_bytes_sent
        self._patches = [mock.patch.object(dist, name, self._counting(name)) for name in GATHERS]

    def _counting(self, name: str) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            if name == "all_gather_object":
                results = kwargs.get("object_list", args[0] if args else None)
                sizes = [len(pickle.dumps(each)) for each in results]
                self.sent += sizes[dist.get_rank()]
                self.received += sum(sizes)
            elif name == "gather_object":
                self.sent += len(pickle.dumps(kwargs["obj"]))
                results = kwargs.get("object_gather_list")
                self.received += sum(len(pickle.dumps(each)) for each in results or ())
            elif name == "scatter_object_list":
                inputs = kwargs.get("scatter_object_input_list")
                self.sent += sum(len(pickle.dumps(each)) for each in inputs or ())
                self.received += len(pickle.dumps(kwargs["scatter_object_output_list"][0]))
            return result

        return call

    def __enter__(self) -> "Bytes":
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()
        if self._tree is not None:
            self.sent += self._tree.num_bytes_sent - self._before


def ratio(first: Callable[[], Any], second: Callable[[], Any], rounds: int = 25) -> float:
    """The median over paired rounds of the first's time divided by the second's."""
    ratios = []
    for number in range(rounds):
        seconds = {}
        for action in (first, second) if number % 2 else (second, first):
            dist.barrier()
            begin = time.perf_counter()
            action()
            seconds[action] = time.perf_counter() - begin
        ratios.append(seconds[first] / seconds[second])
    return median(ratios)


def real_rank(folder: str) -> dict[str, Any]:
    """Return the counts of one of several real ranks."""
    found: dict[str, Any] = {"at the start": num_sockets()}
    model = model_of(4)
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    mesh = wrap_state(model).mesh
    found["after wrapping"] = num_sockets()
    with zeroamp.Preemption(model) as preemption, zeroamp.RunReport(train, f"{folder}/run.jsonl"):
        for number in range(3):
            train.backward(model(TOKENS))
            train.step()
            preemption.is_requested()
            ranks = RankGroup.for_saving(mesh)
            with Bytes(ranks) as counted:
                zeroamp.save_checkpoint(f"{folder}/checkpoints", model, train)
            found[f"bytes of save {number + 1}"] = counted.sent, counted.received
        dist.barrier()
        found["with saves, a report and a preemption"] = num_sockets()
    if RankTree is not None:
        signals, flag, results = RankGroup.for_signals(mesh), torch.zeros(1), [None] * dist.get_world_size()
        found["time of a flag through the tree / gloo's all-reduce"] = ratio(
            lambda: signals.any(False), lambda: dist.all_reduce(flag)
        )
        found["time of an action / all_gather_object"] = ratio(
            lambda: signals.run(lambda: None), lambda: dist.all_gather_object(results, None)
        )
    with Bytes(RankGroup.for_saving(mesh)) as counted:
        zeroamp.load_checkpoint(f"{folder}/checkpoints", model, train)
    found["bytes of a load"] = counted.sent, counted.received
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fake", type=int, nargs="*", default=[8, 64, 1024, 16384])
    parser.add_argument("--ranks", type=int, default=16)
    add_out(parser)
    args = parser.parse_args()
    folder = tempfile.mkdtemp()
    rows: dict[str, list[Any]] = {
        "process groups of a wrap at stage 3": [groups_made(ranks, 2) for ranks in args.fake],
        f"with partitions of {PARTITION}, 2 blocks": [
            groups_made(ranks, 2, zero_hpz_partition_size=PARTITION) for ranks in args.fake
        ],
        f"with partitions of {PARTITION}, 4 blocks": [
            groups_made(ranks, 4, zero_hpz_partition_size=PARTITION) for ranks in args.fake
        ],
    }
    of_steps = [collectives_of_steps(ranks, folder) for ranks in args.fake]
    rows[f"all-reduces on the host in {NUM_STEPS} steps, besides the step's"] = [one for one, _ in of_steps]
    rows[f"other exchanges on the host in {NUM_STEPS} steps"] = [other for _, other in of_steps]
    rows["kernels per reduction: copy, additions, division (computed)"] = [ranks + 1 for ranks in args.fake]
    parts = [tabulate([[name, *values] for name, values in rows.items()], ["fake ranks", *args.fake], "github")]
    if args.ranks:
        processes = Ranks(args.ranks)
        found = processes.run(real_rank, folder)
        processes.stop()
        of_ranks = [
            [name, *(each[name] for each in (found[0], found[1], found[-1]))]
            for name in found[0]
            if not name.startswith("time")
        ]
        times = [f"{name}: {median(each[name] for each in found):.2f}" for name in found[0] if name.startswith("time")]
        parts.append(
            tabulate(of_ranks, [f"{args.ranks} real ranks", "rank 0", "rank 1", "last rank"], "github")
            + "\n\nSockets, and bytes of objects: (sent, received). Of the tree: what a rank sends and "
            "passes on."
        )
        parts.append("; ".join(times))
    shutil.rmtree(folder)
    emit("counts", parts, args.out)


if __name__ == "__main__":
    main()

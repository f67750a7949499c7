"""Process groups of one process: one rank alone, or one rank of several whose peers echo it.

[Note: Echo]
torch's backend "fake" makes one process a rank of many. Its collectives move nothing, and leave the output of an
all-gather uninitialised. Here each collective is issued to that backend. Its output is then filled, on the current
stream, with the values that the other ranks would send if they were copies of this rank. An all-gather repeats the
shard, an all-to-all repeats the rank's own part, a reduction multiplies by the number of ranks. So copies, sums and
streams work on defined values, and the bits of runs can be compared. No communication library and no other rank is
involved.
"""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.fake_ranks import fake_ranks

_ALL_GATHERS = ("all_gather_into_tensor", "all_gather_single")
_REDUCE_SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_single")
_ALL_TO_ALLS = ("all_to_all_single",)
_ALL_REDUCES = ("all_reduce",)
GATHERS_AND_REDUCTIONS = (*_ALL_GATHERS, *_REDUCE_SCATTERS, *_ALL_TO_ALLS)
"""Names in `torch.distributed`; which of them exist depends on the version of torch."""


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Run inside as the only rank: with NCCL on CUDA, else with gloo."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def echoing_ranks(world_size: int) -> Iterator[None]:
    """Run inside as rank 0 of `world_size` ranks that are copies of this one. See [Note: Echo]."""
    fills: dict[str, Callable[..., None]] = {
        **dict.fromkeys(_ALL_GATHERS, _fill_gathered),
        **dict.fromkeys(_REDUCE_SCATTERS, _fill_reduced),
        **dict.fromkeys(_ALL_TO_ALLS, _fill_exchanged),
        **dict.fromkeys(_ALL_REDUCES, _fill_all_reduced),
    }
    with fake_ranks(world_size), around_collectives({name: _then(fill) for name, fill in fills.items()}):
        yield


@contextmanager
def around_collectives(wrappers: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]) -> Iterator[None]:
    """Wrap functions of `torch.distributed`. Names that this version of torch does not have are left out."""
    with ExitStack() as patches:
        for name, wrapper in wrappers.items():
            if hasattr(dist, name):
                patches.enter_context(mock.patch.object(dist, name, wrapper(getattr(dist, name))))
        yield


def _then(fill: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrapper(collective: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(collective)

        def filled(*args: Any, **kwargs: Any) -> Any:
            work = collective(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            if any(value is not None for name, value in given.items() if "split" in name):
                raise AssertionError("expected an all-to-all of equal parts")
            group, op = given.get("group"), given.get("op", dist.ReduceOp.SUM)
            tensors = [value.detach() for value in given.values() if isinstance(value, torch.Tensor)]
            fill(*tensors, num_ranks=dist.get_world_size(group), rank=dist.get_rank(group), op=op)
            return work

        return filled

    return wrapper


def _fill_gathered(output: torch.Tensor, shard: torch.Tensor, *, num_ranks: int, **_: Any) -> None:
    output.view(num_ranks, -1).copy_(shard.reshape(1, -1).expand(num_ranks, -1))


def _fill_reduced(output: torch.Tensor, whole: torch.Tensor, *, num_ranks: int, rank: int, op: Any) -> None:
    output.view(-1).copy_(whole.view(num_ranks, -1)[rank])
    if op == dist.ReduceOp.SUM:
        output.mul_(num_ranks)


def _fill_exchanged(output: torch.Tensor, sent: torch.Tensor, *, num_ranks: int, rank: int, **_: Any) -> None:
    output.view(num_ranks, -1).copy_(sent.view(num_ranks, -1)[rank].expand(num_ranks, -1))


def _fill_all_reduced(tensor: torch.Tensor, *, num_ranks: int, op: Any, **_: Any) -> None:
    if op == dist.ReduceOp.SUM:
        tensor.mul_(num_ranks)

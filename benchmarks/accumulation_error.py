"""Error of gradients accumulated over sixteen micro-batches, and of one reduction, against fp64. Prints two tables.

    python -m benchmarks.accumulation_error

Two gloo ranks for the first table (its bounds are asserted in tests/zeroamp/training/test_accumulation.py), 2, 4 and 8
for the second.
"""

import torch
import torch.distributed as dist
from tabulate import tabulate

from tests.measuring import accumulation
from tests.processes.ranks import Ranks
from zeroamp.hooks.collectives.gradient_reduction import GroupReduceScatter
from zeroamp.planning.group_dtypes import Reduction
from zeroamp.policies.accumulation import ACCUMULATE, COMPUTE, STAGES
from zeroamp.policies.dtypes import short_name

NUMEL_PER_RANK = 100_000


def accumulation_rows() -> list[list[str]]:
    """Relative error of the accumulated gradient per cell; an empty cell is refused."""
    ranks = Ranks(2)
    rows = []
    for mode, low_dtype in COMPUTE:
        runs = ranks.run(accumulation.all_cells, mode, low_dtype)[0]
        errors = accumulation.relative_errors(mode, low_dtype, runs)
        name = f"{mode} {short_name(low_dtype)}" if mode == "autocast" else mode
        for dtype in ACCUMULATE:
            cells = [f"{errors[dtype, stage]:.1e}" if (dtype, stage) in errors else "" for stage in STAGES]
            rows.append([name, short_name(dtype), *cells])
    ranks.stop()
    return rows


def _gradient(rank: int, world_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(NUMEL_PER_RANK * world_size, generator=generator).to(torch.bfloat16)


def _reduce(collective: Reduction, communication_dtype: torch.dtype) -> torch.Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    comm = GroupReduceScatter(
        communication_dtype=communication_dtype,
        reduce_dtype=torch.float32 if collective == "all_to_all" else communication_dtype,
        collective=collective,
        world_size=world_size,
    )
    sent = comm.allocate((NUMEL_PER_RANK * world_size,), dtype=torch.float32, device=torch.device("cpu"))
    result = comm.allocate((NUMEL_PER_RANK,), dtype=torch.float32, device=torch.device("cpu"))
    sent.copy_(_gradient(rank, world_size))
    comm(result, sent, dist.group.WORLD, dist.ReduceOp.AVG)
    return result.double()


def reduction_rows() -> list[list[str]]:
    """Relative error of one averaged reduction of bf16 gradients."""
    rows = []
    for world_size in (2, 4, 8):
        ranks = Ranks(world_size)
        exact = sum(_gradient(rank, world_size).double() for rank in range(world_size)) / world_size
        row = [str(world_size)]
        bf16, fp32 = torch.bfloat16, torch.float32
        for collective, dtype in (("reduce_scatter", bf16), ("all_to_all", bf16), ("reduce_scatter", fp32)):
            got = torch.cat(ranks.run(_reduce, collective, dtype))
            row.append(f"{float((got - exact).norm() / exact.norm()):.2e}")
        rows.append(row)
        ranks.stop()
    return rows


if __name__ == "__main__":
    print(f"torch {torch.__version__}\n")
    print(tabulate(accumulation_rows(), headers=["compute", "accumulate", *(f"stage {s}" for s in STAGES)]))
    headers = ["ranks", "native bf16", "bf16 summed in fp32", "native fp32"]
    print("\n" + tabulate(reduction_rows(), headers=headers))

"""Time of gloo's reduce-scatter in bf16 beside zeroamp's all-to-all and sum, of one block of the 100M model."""

import time
from statistics import median, quantiles

import torch
import torch.distributed as dist

from zeroamp.hooks.collectives.tree_sum import tree_sum

dist.init_process_group("gloo")
gradient = torch.randn(7_080_960).bfloat16()
half = len(gradient) // 2
rows, shard = torch.empty(2, half, dtype=torch.bfloat16), torch.empty(half, dtype=torch.bfloat16)
sums = torch.empty(half)


def reduce_scatter():
    dist.reduce_scatter_tensor(shard, gradient)


def all_to_all():
    dist.all_to_all_single(rows.view(-1), gradient)


def all_to_all_and_sum():
    all_to_all()
    tree_sum(rows, sums)


seconds = {reduce_scatter: [], all_to_all_and_sum: [], all_to_all: []}
for _ in range(25):
    for operation, found in seconds.items():
        dist.barrier()
        start = time.perf_counter()
        operation()
        found.append(time.perf_counter() - start)
if dist.get_rank() == 0:
    base = seconds[reduce_scatter][5:]
    print(f"reduce-scatter: {1e3 * median(base):.1f} ms")
    for operation in (all_to_all_and_sum, all_to_all):
        ratios = [one / other for one, other in zip(seconds[operation][5:], base, strict=True)]
        print(operation.__name__, [round(each, 2) for each in quantiles(ratios)])
dist.destroy_process_group()

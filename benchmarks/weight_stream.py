"""Time of `zeroamp.iter_weights` beside `full_tensor()` of each parameter: paired rounds in the same processes.

    torchrun --nproc-per-node 2 -m benchmarks.weight_stream [--rounds 10]

A round reads all weights of the 100M model in bf16 once in each way, in an order that alternates, after a barrier.
"""

import argparse
import time
from collections.abc import Iterator
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import zeroamp
from benchmarks.peers.model import SHAPES, Decoder


def full_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter as libraries do without a stream: all-gathered in fp32, then cast."""
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        yield name, whole.detach().to(torch.bfloat16)


def main() -> None:
    """Measure, and print a table on the first rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    dist.init_process_group("gloo")
    config = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 3}}
    torch.manual_seed(0)
    model = zeroamp.wrap_model(Decoder(SHAPES["100m"], 128), config)
    ways = {"full_tensor": full_tensors, "iter_weights": lambda each: zeroamp.iter_weights(each, bucket_bytes=2**25)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(rounds + 1):
        for name in sorted(ways, reverse=index % 2 == 0):
            dist.barrier()
            begin = time.perf_counter()
            for _name, tensor in ways[name](model):
                tensor.view(-1)[0].item()
            seconds[name].append(time.perf_counter() - begin)
    pairs = zip(seconds["iter_weights"][1:], seconds["full_tensor"][1:], strict=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    if dist.get_rank() == 0:
        low, _, high = quantiles(ratios, n=4)
        for name in ways:
            print(f"{name}: {1e3 * median(seconds[name][1:]):.0f} ms")
        print(f"iter_weights / full_tensor: {median(ratios):.2f} ({low:.2f} to {high:.2f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

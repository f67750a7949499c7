"""Time and host memory of `discover_safe_parameters` on a 7B LLaMA that exists on the meta device only.

    python -m benchmarks.trace_time [--layers 32] [--length 2048] [--repeats 3]

Prints one line per repeat: the first pays for imports and for FakeTensorMode's caches.
"""

import argparse
import resource
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zeroamp


def peak_host_gib() -> float:
    """Peak resident memory of this process so far, in GiB (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="decoder layers; 32 is the 7B model")
    parser.add_argument("--length", type=int, default=2048, help="tokens in the one sequence of the example batch")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=options.layers))
    tokens = torch.zeros(1, options.length, dtype=torch.long)
    numel = sum(parameter.numel() for parameter in model.parameters())
    before = peak_host_gib()
    print(f"torch {torch.__version__}, {numel / 1e9:.2f}e9 parameters, {before:.2f} GiB resident at peak before")
    for repeat in range(options.repeats):
        started = time.perf_counter()
        found = zeroamp.discover_safe_parameters(model, kwargs={"input_ids": tokens})
        print(
            f"run {repeat}: {time.perf_counter() - started:.2f} s, {len(found.safe)} of {len(found.reasons)} safe, "
            f"peak {peak_host_gib() - before:.2f} GiB more than before"
        )


if __name__ == "__main__":
    main()

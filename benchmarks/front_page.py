"""One table: what zeroamp and its peers send, hold and round, on one model.

    torchrun --nproc-per-node 2 -m benchmarks.front_page --errors FOLDER --out FOLDER

Bytes and memory are measured here: the 3.7m model at two ranks. The error of the sum is that of 1,024 virtual ranks, of
the same model: `benchmarks.loss_curves --errors` has written it.
"""

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import shared_runs
from benchmarks.peers import record
from benchmarks.peers.engine import UnavailableError, setup
from benchmarks.peers.engines import builder
from benchmarks.peers.options import Options
from benchmarks.peers.processes import start
from benchmarks.step_memory import measure_one
from benchmarks.step_time import counted

ROWS = {  # engine -> (name, compute, the method of `loss_curves` with its sum, lines added to an FSDP2 loop)
    "FSDP2 autocast reshard": ("FSDP2, fp32 under `torch.autocast`", "autocast", "autocast, fp32 sum", 1),
    "FSDP2 bf16 fp32 reduce": (
        "FSDP2, `MixedPrecisionPolicy(bf16, fp32)`",
        "all in bf16",
        "MixedPrecisionPolicy(bf16, fp32)",
        0,
    ),
    "FSDP2 bf16 reshard": ("FSDP2, all in bf16", "all in bf16", "all bf16", 0),
    "DeepSpeed 3 small": ("DeepSpeed ZeRO-3, `torch_autocast`", "autocast", "autocast, bf16 ring", 3),
    "zeroamp 3": ("**zeroamp ZeRO-3, `torch_autocast`**", "autocast", "zeroamp", 2),
}


def row(engine: str, found: dict[str, Any], errors: list[dict[str, Any]]) -> dict[str, str]:
    """Return the cells of an engine."""
    name, compute, method, lines = ROWS[engine]
    of_sum = mean(each["of the sum"][method]["all"] for each in errors)
    return {
        "": name,
        "compute": compute,
        "sent per parameter": found.get("reason") or f"{found['sent']:.1f} bytes",
        "error of a sum over 1,024 ranks": f"{of_sum:.1e}",
        "memory per parameter": found.get("reason") or f"{found['held']:.1f} bytes, at the peak {found['peak']:.1f}",
        "lines added": str(lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--errors", type=Path, required=True, help="folder of `benchmarks.loss_curves`")
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    arguments = parser.parse_args()
    runs = shared_runs.read(arguments.errors / "errors")
    errors = [run for run in runs if (run["model"], run["ranks"]) == ("3.7m", 1024)]
    if not errors:
        raise SystemExit(f"{arguments.errors} has no errors of 1,024 ranks. Run benchmarks.loss_curves --errors first.")
    options = Options(rounds=5, warm_up=2)
    device = start(options)
    ready = setup(options, device, dist.get_rank())
    numel = sum(parameter.numel() for parameter in ready.model().parameters())
    measured: dict[str, dict[str, Any]] = {}
    for engine in ROWS:
        try:
            of_memory = measure_one(engine, ready)
            moved = counted(builder(engine)(ready))
        except UnavailableError as error:
            measured[engine] = {"reason": str(error)}
            continue
        scale = dist.get_world_size() / numel
        sent = sum(size * (2 if "all_reduce" in kind else 1) for kind, (_, size) in moved.items())
        measured[engine] = {"sent": sent / numel, "held": of_memory["held"] * scale, "peak": of_memory["peak"] * scale}
        measured[engine]["moved"] = {f"{kind[0]} {kind[1]}": size for kind, (_, size) in moved.items()}
    if dist.get_rank() == 0:
        body = "\n\n".join(
            [
                *record.head("benchmarks.front_page", options, device),
                "Sent: bytes of unsharded tensors in a step, an all-reduce twice, divided by the parameters. Peak: "
                "bytes of all tensor storages in a step, activations too, of the rank that had most, times the ranks, "
                f"divided by the parameters. Error: |sum - exact| / |exact| of all gradients, {len(errors)} seeds.",
                record.markdown([row(engine, found, errors) for engine, found in measured.items()]),
            ]
        )
        print(body)
        values = {"versions": record.versions(), "engines": measured}
        record.write(arguments.out, title="zeroamp and its peers", body=body, name="front_page", values=values)
    torch.distributed.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

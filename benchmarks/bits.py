"""Hashes losses, norms and parameters of small trainings, so that the bits of two commits can be compared.

    python -m benchmarks.bits OUT.json [--ranks 2 3 4 8]
    python -m benchmarks.bits OUT.json --save FOLDER      # the second step of some trainings is saved as a checkpoint
    python -m benchmarks.bits OUT.json --resume FOLDER    # and continued from it

A cell is a model, a config, a ZeRO stage and a number of ranks, on gloo: four optimizer steps. OUT.json has for each
cell the hash of all losses, norms and parameters, with the last loss and norm; or "ERROR" and its text. Two commits
that train to the same bits write the same file. A run that is resumed has other hashes than one that is not, because it
has fewer losses.
"""

import argparse
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zeroamp
from tests.models.small import batch, build, loss_of

NUM_STEPS, SAVED_AT = 4, 2
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
SAVED = (
    *("autocast llama_tied 0", "autocast llama_untied 1", "autocast llama_tied 2", "autocast llama_untied 3"),
    *("fp16 autocast llama_tied 3", "bf16 llama_untied 3", "clipped llama_tied 1"),
)
"""The cells that --save and --resume train."""

Mode = Literal["", "save", "resume"]
Result = tuple[str, Any]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training."""

    name: str
    model: str
    stage: int
    config: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    clip: float = 0.0
    is_adamw: bool = True
    replicas: int = 1

    def policy(self) -> zeroamp.Policy:
        """Return the policy of the cell."""
        zero = {"stage": self.stage, "reduce_bucket_size": 0}
        own = {"gradient_accumulation_steps": self.micro_batches, "gradient_clipping": self.clip}
        return zeroamp.policy_from_config({**self.config, "zero_optimization": zero, **own})

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of a wrapped model."""
        if self.is_adamw:
            return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def cells(num_ranks: int) -> Iterator[Cell]:
    """Yield the cells of a number of ranks. 3 and 8 ranks have few of them."""
    for stage in range(4):
        yield from (
            cell for cell in _of_stage(stage, num_ranks) if num_ranks in (2, 4) or _is_of_all_ranks(cell, num_ranks)
        )


def _is_of_all_ranks(cell: Cell, num_ranks: int) -> bool:
    kinds = ("autocast llama_tied", "clipped llama_tied", *(("reproducible",) if num_ranks == 8 else ()))
    return cell.name.startswith(kinds)


def _of_stage(stage: int, num_ranks: int) -> Iterator[Cell]:
    for model in ("llama_tied", "llama_untied", "conv", "encoder", "moe"):
        yield Cell(name=f"autocast {model} {stage}", model=model, stage=stage, config=AUTOCAST)
    half = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    native = {**AUTOCAST, "zeroamp": {"reduce_accumulate_dtype": "native"}}
    low_sums = {**AUTOCAST, "data_types": {"grad_accum_dtype": "bf16"}}
    for model in ("llama_tied", "llama_untied"):
        for kind, config, micro_batches, clip, is_adamw in (
            ("clipped", AUTOCAST, 4, 0.5, True),
            ("native", native, 2, 0.5, False),
            ("sums in bf16", low_sums, 3, 0.0, True),
            ("fp32 communication", {**AUTOCAST, "communication_data_type": "fp32"}, 3, 0.0, True),
            ("fp16 autocast", half, 2, 0.5, True),
            ("bf16", {"bf16": {"enabled": True}}, 2, 0.5, True),
            ("fp16", {"fp16": {"enabled": True, "initial_scale_power": 8}}, 2, 0.5, False),
            ("fp32", {}, 2, 0.5, True),
        ):
            yield Cell(
                name=f"{kind} {model} {stage}", model=model, stage=stage, config=config,
                micro_batches=micro_batches, clip=clip, is_adamw=is_adamw,
            )  # fmt: skip
    llama = {"model": "llama_tied", "stage": stage, "clip": 0.5}
    if stage >= 2:
        exact = {**AUTOCAST, "zeroamp": {"reproducible": True}}
        yield Cell(name=f"reproducible {stage}", config=exact, micro_batches=2, **llama)
    if num_ranks == 4:
        two_levels = {**AUTOCAST, "zeroamp": {"ranks_per_node": 2}}
        yield Cell(name=f"two levels {stage}", config=two_levels, micro_batches=2, **llama)
        if stage > 0:
            yield Cell(name=f"replicas {stage}", config=AUTOCAST, micro_batches=3, replicas=2, **llama)


def train(cell: Cell, mode: Mode, folder: Path | None) -> Result:
    """Train one cell on this rank. Return the hash, and the last loss and norm."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    shape = (cell.replicas, num_ranks // cell.replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if cell.replicas > 1 else None
    units = {"Sequential"} if cell.model == "conv" else None
    model = zeroamp.wrap_model(build(cell.model), cell.policy(), mesh, units)
    step = zeroamp.TrainStep(model, cell.optimizer(model))
    at = None if folder is None else folder / cell.name.replace(" ", "_")
    if mode == "resume" and at is not None:
        zeroamp.load_checkpoint(at, model, step)
    reported = []
    for number in range(SAVED_AT if mode == "resume" else 0, NUM_STEPS):
        for index in range(cell.micro_batches):
            seen = (number * cell.micro_batches + index) * num_ranks + rank
            step.backward(loss_of(model, batch(cell.model, seen)))
            report = step.step()
        if report is None:
            raise AssertionError("expected a report after the last micro-batch, got None")
        reported.append((float(report.loss), float(report.grad_norm)))
        if mode == "save" and at is not None and number + 1 == SAVED_AT:
            zeroamp.save_checkpoint(at, model, step)
    digest = hashlib.sha256(repr(reported).encode())
    for fqn, parameter in sorted(model.named_parameters()):
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(fqn.encode() + whole.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16], reported[-1]


def run(rank: int, num_ranks: int, scratch: str, mode: Mode, folder: Path | None) -> None:
    """Train all cells of a number of ranks. The first rank writes the results to `scratch`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=num_ranks)
    results: dict[str, Result] = {}
    for cell in cells(num_ranks):
        if mode and cell.name not in SAVED:
            continue
        try:
            results[cell.name] = train(cell, mode, folder)
        except Exception as error:  # all ranks raise it
            results[cell.name] = ("ERROR", f"{type(error).__name__}: {error}")
    if rank == 0:
        Path(scratch, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def main() -> None:
    """Parse the command line, train, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3, 4, 8])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--resume", type=Path)
    options = parser.parse_args()
    mode: Mode = "save" if options.save else "resume" if options.resume else ""
    total = {}
    for num_ranks in [2] if mode else options.ranks:
        with tempfile.TemporaryDirectory() as scratch:
            mp.spawn(run, (num_ranks, scratch, mode, options.save or options.resume), nprocs=num_ranks)
            found = json.loads(Path(scratch, "results.json").read_text())
        total |= {f"{num_ranks} ranks, {name}": result for name, result in found.items()}
    options.out.write_text(json.dumps(total, indent=0) + "\n")
    print(f"{len(total)} cells, {sum(result[0] == 'ERROR' for result in total.values())} raised")


if __name__ == "__main__":
    main()

"""Part 3: two gloo ranks on one GPU, which exchange real values, against plain torch.

NCCL refuses two ranks on one GPU. gloo sends CUDA tensors through the host, if it has the collective for them. Each
collective is tried first. Losses, norms and each rank's shards are compared as in part 1.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import zeroamp
from benchmarks.gpu_check.correctness import CLIP, LOSSES, NORMS, PARAMETERS
from benchmarks.gpu_check.faults import planted
from benchmarks.gpu_check.verdict import Place, Result
from tests.models.small import batch, build, loss_of
from tests.oracles import one_process
from tests.processes.training import config, wrapped

WORLD_SIZE = 2
MODEL = "llama_untied"
TIMEOUT = timedelta(seconds=60)


def run(place: Place) -> Result:
    """Start two ranks and compare them with plain torch."""
    num_steps, stages = 2 if place.small else 5, (0, 1, 2, 3)
    with tempfile.TemporaryDirectory() as folder:
        answers = _start(place, Path(folder), num_steps, stages)
    failures = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, str)]
    if failures:
        return Result.of(failures, "")
    missing = {name: why for answer in answers for name, why in answer["missing"].items()}
    if missing:
        what = ", ".join(f"{name} ({why})" for name, why in missing.items())
        return Result(verdict="not measured", reason=f"gloo does not have for {place.device.type} tensors: {what}")
    expected = one_process.train(MODEL, world_size=WORLD_SIZE, num_steps=num_steps, clip=CLIP, device=place.device.type)
    rows = []
    for rank, answer in enumerate(answers):
        for stage, found in answer["runs"].items():
            row = {"rank": rank, "stage": stage, **compared(rank, found, expected)}
            rows.append(row)
            failures += [f"rank {rank}, stage {stage}: {text}" for text in wrong(row, place)]
    worst = ", ".join(f"{key} {max(row[key] for row in rows):.1e}" for key in ("losses", "norms", "change"))
    equal = sum(row["differing shards"] == 0 for row in rows)
    summary = (
        f"{len(rows)} runs of {num_steps} steps, {equal} with the bits of plain torch; largest differences {worst}"
    )
    return Result.of(failures, summary, tables={"Two ranks against plain torch": rows})


def _start(place: Place, folder: Path, num_steps: int, stages: tuple[int, ...]) -> list[Any]:
    """Return each rank's answer, or the last line of its error."""
    command = [sys.executable, "-m", "benchmarks.gpu_check.two_ranks", "--device", place.device.type]
    command += ["--folder", str(folder), "--steps", str(num_steps), "--stages", ",".join(map(str, stages))]
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(WORLD_SIZE)
    ]
    answers: list[Any] = []
    for rank, process in enumerate(ranks):
        _, errors = process.communicate()
        if process.returncode:
            answers.append((errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
        else:
            answers.append(torch.load(folder / f"{rank}.pt"))
    return answers


def compared(rank: int, found: dict[str, Any], expected: Any) -> dict[str, Any]:
    """Return how far a rank's result of `trained` is from that of `one_process.train`."""
    losses, norms, parameters = expected
    before = {fqn: parameter.detach() for fqn, parameter in build(MODEL).named_parameters()}
    of_rank = [ranks[rank] for ranks in losses]
    distance = change = 0.0
    differing = 0
    for fqn, (shard, dim, num_shards, place) in found["shards"].items():
        theirs, first = (torch.chunk(whole, num_shards, dim)[place] for whole in (parameters[fqn], before[fqn]))
        distance += float((shard - theirs).double().pow(2).sum())
        change += float((theirs - first).double().pow(2).sum())
        differing += not torch.equal(shard, theirs)
    return {
        "losses": max(abs(a - b) / abs(b) for a, (b,) in zip(found["losses"], of_rank, strict=True)),
        "norms": max(abs(a - b) / abs(b) for a, b in zip(found["norms"], norms, strict=True)),
        "change": (distance / change) ** 0.5,
        "differing shards": differing,
    }


def wrong(row: dict[str, Any], place: Place) -> list[str]:
    """Return what is too far from plain torch: on a CPU, anything that has other bits."""
    limits = {"losses": LOSSES, "norms": NORMS, "change": PARAMETERS}
    if not place.on_cuda:
        limits = dict.fromkeys(limits, 0.0)
    return [
        f"{key} differ by {row[key]:.1e} from plain torch, more than {most}"
        for key, most in limits.items()
        if not row[key] <= most  # nan too
    ]


def missing_collectives(device: torch.device) -> dict[str, str]:
    """Return the needed collectives that gloo refuses for tensors on this device, with gloo's error message."""
    refused = {}
    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
        "all_gather_into_tensor": lambda one, two: dist.all_gather_into_tensor(two, one),
        "all_to_all_single": lambda _, two: dist.all_to_all_single(torch.empty_like(two), two),
        "all_reduce": lambda one, _: dist.all_reduce(one.float()),
    }
    for dtype in (torch.bfloat16, torch.float32):
        one, two = torch.ones(1, dtype=dtype, device=device), torch.ones(2, dtype=dtype, device=device)
        for name, call in calls.items():
            try:
                call(one, two)
            except (RuntimeError, NotImplementedError) as error:
                refused[name] = str(error).splitlines()[0]
    return refused


def trained(model: nn.Module, num_steps: int) -> dict[str, Any]:
    """Train a wrapped `MODEL` on this rank. Return its losses, the norms, and this rank's shards."""
    train = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
    losses, norms = [], []
    for index in range(num_steps):
        loss = loss_of(model, batch(MODEL, index * dist.get_world_size() + dist.get_rank()))
        losses.append(float(loss.detach()))
        train.backward(loss)
        report = train.step()
        norms.append(float(report.grad_norm))
    planted("wrong bit", dict(model.named_parameters()))
    return {"losses": losses, "norms": norms, "shards": {fqn: _shard(p) for fqn, p in model.named_parameters()}}


def _shard(parameter: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """Return this rank's part on the CPU, the dimension that is sharded, into how many parts, and which part it is."""
    if not isinstance(parameter, DTensor):
        return parameter.detach().cpu(), 0, 1, 0
    axis = parameter.device_mesh.ndim - 1  # the axis that shards is the last; it has one rank at stage 0
    dim = next(placement.dim for placement in parameter.placements if placement.is_shard())
    mesh = parameter.device_mesh
    return parameter.to_local().detach().cpu(), dim, mesh.size(axis), mesh.get_local_rank(axis)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--device", "--folder", "--stages"):
        parser.add_argument(name, required=True)
    for name in ("--rank", "--steps"):
        parser.add_argument(name, required=True, type=int)
    given = parser.parse_args()
    folder, device = Path(given.folder), torch.device(given.device)
    if device.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:gloo",
        store=dist.FileStore(str(folder / "store"), WORLD_SIZE),
        rank=given.rank,
        world_size=WORLD_SIZE,
        timeout=TIMEOUT,
    )
    answer: dict[str, Any] = {"missing": missing_collectives(device), "runs": {}}
    if not answer["missing"]:
        for stage in map(int, given.stages.split(",")):
            answer["runs"][stage] = trained(wrapped(MODEL, config(stage, clip=CLIP)), given.steps)
    torch.save(answer, folder / f"{given.rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

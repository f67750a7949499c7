"""Part 1: one rank at every stage and in every mode, against plain torch.

On a CPU every loss, norm and parameter must have the bits of plain torch. On CUDA there are tolerances, because cuBLAS
chooses its algorithm also by the alignment of the operands, and a difference in the last bit of a 16-bit value grows
over the steps. The record has the number of runs with the same bits.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check import ranks
from benchmarks.gpu_check.faults import planted
from benchmarks.gpu_check.verdict import Place, Result
from tests.models.small import build
from tests.oracles import one_process
from tests.processes.training import Run, config, same_bits, train

CLIP = 0.5  # low enough that every step clips
LOSSES, NORMS, PARAMETERS = 4e-3, 2e-2, 0.1
"""Largest relative differences on CUDA: of a loss, of a norm, and of the change of all parameters by training (2-norm).
On a CPU, changing each element of each 16-bit matrix product by up to one unit in the last place gave at most 2e-3,
6e-3 and 0.05."""

CUDA_TESTS = ("tests/hooks/collectives/test_tree_sum.py",)

MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "autocast bf16": ({}, {}),
    "a group per unit": ({"threshold": 0}, {}),
    "autocast fp16": (
        {"dtype": "float16", "fp16": {"loss_scale": 1024}},
        {"autocast": torch.float16, "loss_scale": 1024.0},
    ),
    "bf16": ({"dtype": None, "bf16": {"enabled": True}}, {"low_model": torch.bfloat16}),
}
"""Name -> (keywords of the config, keywords of the oracle)."""


def run(place: Place) -> Result:
    """Train small models at every stage and compare."""
    models, num_steps = (("llama_untied",), 2) if place.small else (("llama_tied", "llama_untied"), 5)
    rows, failures = [], []
    with ranks.one_rank(place.device):
        for name in models:
            for mode, (of_config, of_oracle) in MODES.items():
                expected = one_process.train(
                    name, world_size=1, num_steps=num_steps, clip=CLIP, device=place.device.type, **of_oracle
                )
                for stage in (0, 1, 2, 3):
                    found = train(name, config(stage, clip=CLIP, **of_config), num_steps)
                    planted("wrong bit", found.parameters)
                    row = {"model": name, "mode": mode, "stage": stage, **compared(name, found, expected)}
                    rows.append(row)
                    failures += [f"{name}, {mode}, stage {stage}: {text}" for text in wrong(row, place)]
    of_tests, text = cuda_tests()
    failures += of_tests
    equal = sum(row["differing parameters"] == 0 for row in rows)
    what = f"{len(rows)} runs of {num_steps} steps against plain torch, {equal} with its bits"
    worst = {key: max(row[key] for row in rows) for key in ("losses", "norms", "change")}
    summary = f"{what}; largest relative differences {', '.join(f'{key} {value:.1e}' for key, value in worst.items())}"
    return Result.of(failures, f"{summary}; tests: {text}", tables={"One rank against plain torch": rows})


def cuda_tests() -> tuple[list[str], str]:
    """Run the tests that need CUDA or a torch built for it. Return the failures, and the last line of pytest.

    Without CUDA pytest skips these tests. This still shows that pytest can collect them.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cuda", *CUDA_TESTS]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    last = lines[-1].strip("= ") if lines else done.stderr.strip()[-300:]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return ([f"tests: {' '.join(failed[:3]) or last}"] if done.returncode else []), last


def compared(name: str, found: Run, expected: Any) -> dict[str, Any]:
    """Return how far a run is from the oracle: relative differences, and the number of parameters that differ."""
    losses, norms, parameters = expected
    before = {fqn: parameter.detach() for fqn, parameter in build(name).named_parameters()}
    distance = sum(float((found.parameters[fqn] - parameters[fqn]).double().pow(2).sum()) for fqn in parameters)
    change = sum(float((parameters[fqn] - before[fqn]).double().pow(2).sum()) for fqn in parameters)
    return {
        "losses": _relative([loss for (loss,) in found.losses], [loss for ((loss,),) in losses]),
        "norms": _relative([float(norm) for norm in found.norms], norms),
        "change": (distance / change) ** 0.5,
        "differing parameters": len(same_bits(found.parameters, parameters)),
    }


def wrong(row: dict[str, Any], place: Place) -> list[str]:
    """Return what is too far from the oracle."""
    if not place.on_cuda:
        exact = row["losses"] == row["norms"] == 0 and row["differing parameters"] == 0
        return [] if exact else [f"not the bits of plain torch ({row['differing parameters']} parameters differ)"]
    limits = {"losses": LOSSES, "norms": NORMS, "change": PARAMETERS}
    # `not <=`: nan is wrong too
    return [f"{key} differ by {row[key]:.1e}, more than {most}" for key, most in limits.items() if not row[key] <= most]


def _relative(found: list[float], expected: list[float]) -> float:
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(found, expected, strict=True))

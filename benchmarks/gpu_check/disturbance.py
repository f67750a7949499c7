"""Part 2: the same bits while streams, launches and the allocator are disturbed.

Each variant runs in its own process and trains the same cases: one of eight ranks whose peers echo it (see `ranks.py`),
at stages 0 to 3, and one rank alone. If a kernel does not wait for its inputs, or if memory is used again too early, at
least one variant should have other bits. All algorithms are deterministic, so two undisturbed runs must have the same
bits. The variant "again" checks this.

torch's sanitizer (`torch.cuda._sanitizer`) follows every op of torch, and reports accesses of two streams to the same
memory without an order between them. It does not follow Triton kernels. FSDP2 alone runs under it too.

There is no tolerance: the same kernels run on the same device in all variants.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu_check import ranks
from benchmarks.gpu_check.faults import planted
from benchmarks.gpu_check.training import fsdp2_training, zeroamp_training
from benchmarks.gpu_check.verdict import Place, Result
from zeroamp.hooks.collectives import tree_sum

WORLD_SIZE = 8
SLEEP_CYCLES, SLEEP_S = 4_000_000, 0.0005
"""About 2 ms on a GPU, hundreds of times as long as a kernel of these models; 0.5 ms on a CPU, which has no streams."""
PLAIN = "plain"
SLEEPING = "streams that sleep"
EVERYWHERE: dict[str, dict[str, str]] = {PLAIN: {}, "again": {}, "memory filled": {}, SLEEPING: {}}
"""Variant -> environment variables of its process."""
ON_CUDA = {
    "launches that block": {"CUDA_LAUNCH_BLOCKING": "1"},
    "no caching of memory": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
}
SANITIZERS = ("sanitizer", "sanitizer, FSDP2 alone")
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def run(place: Place) -> Result:
    """Start a process per variant, and compare the bits of all variants."""
    variants = EVERYWHERE | (ON_CUDA if place.on_cuda else {})
    names = [*variants, *(SANITIZERS if place.on_cuda else ())]
    with ThreadPoolExecutor(4 if place.on_cuda else 2) as pool:
        answers = dict(
            zip(names, pool.map(lambda name: _start(name, variants.get(name, {}), place), names), strict=True)
        )
    failures, rows = [], []
    plain = answers[PLAIN]
    for name in names:
        found = answers[name]
        row = {"variant": name, **{case: text[:12] for case, text in found.get("bits", {}).items()}}
        rows.append(row | {key: found[key] for key in ("reports", "error") if key in found})
        if "error" in found and name in variants:
            failures.append(f"{name}: {found['error']}")
        elif name in variants and "bits" in plain:
            other = [case for case, text in found["bits"].items() if text != plain["bits"][case]]
            if other:
                failures.append(f"{name}: other bits than undisturbed ({', '.join(other)})")
    failures += _reported(answers) if place.on_cuda else []
    num_cases = len(plain.get("bits", ()))
    return Result.of(
        failures,
        f"{num_cases} cases with the same bits in {len(variants)} variants"
        + (_summary(answers) if place.on_cuda else ""),
        not_measured="" if place.on_cuda else f"{', '.join((*ON_CUDA, 'sanitizer'))} (no CUDA)",
        tables={"The first digits of the sha256 of the parameters": rows},
        values={"answers": answers},
    )


def _reported(answers: dict[str, Any]) -> list[str]:
    ours, theirs = (answers[name] for name in SANITIZERS)
    if "error" in ours and "error" not in theirs:
        return [f"sanitizer: {ours['error']}"]
    if ours.get("reports") and theirs.get("reports") == 0:
        return [f"the sanitizer has {ours['reports']} reports, and none of FSDP2 alone: {ours['first']}"]
    return []


def _summary(answers: dict[str, Any]) -> str:
    ours, theirs = (str(answers[name].get("reports", answers[name].get("error"))) for name in SANITIZERS)
    return f"; reports of the sanitizer: {ours}, of FSDP2 alone: {theirs}"


def _start(variant: str, environment: dict[str, str], place: Place) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu_check.disturbance", "--device", place.device.type]
    command += ["--variant", variant, *(["--small"] if place.small else [])]
    done = subprocess.run(
        command, env={**os.environ, **_DETERMINISTIC, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1], "log": done.stderr}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def trained(place: Place, variant: str) -> dict[str, str]:
    """Return case -> digest of the parameters."""
    num_steps = 2 if place.small else 5
    found = {}
    for stage in (0, 1, 2, 3):
        with ranks.echoing_ranks(WORLD_SIZE), _disturbed(place, variant):
            training = zeroamp_training(place, stage, gradient_accumulation_steps=2 if stage == 2 else 1)
            for _ in range(num_steps):
                training.step()
            if variant == SLEEPING:
                planted("wrong bit when disturbed", dict(training.model.named_parameters()))
            found[f"stage {stage} of {WORLD_SIZE}"] = training.digest()
    with ranks.one_rank(place.device), _disturbed(place, variant):
        training = zeroamp_training(place, 3)
        for _ in range(num_steps):
            training.step()
        found["stage 3 alone"] = training.digest()
    return found


@contextmanager
def _disturbed(place: Place, variant: str) -> Iterator[None]:
    """Sleep in the streams of all-gathers and reductions: before and after each collective and each sum over ranks."""
    if variant != SLEEPING:
        yield
        return

    def sleep() -> None:
        if place.on_cuda:
            torch.cuda._sleep(SLEEP_CYCLES)
        else:
            time.sleep(SLEEP_S)

    with ExitStack() as patches:
        patches.enter_context(ranks.around_collectives(dict.fromkeys(ranks.GATHERS_AND_REDUCTIONS, _between(sleep))))
        kernel = tree_sum._kernel() if place.on_cuda else None
        if kernel is not None:
            patches.enter_context(mock.patch.object(tree_sum, "_kernel", return_value=_between(sleep)(kernel)))
        patches.enter_context(mock.patch.object(tree_sum, "_loop", _between(sleep)(tree_sum._loop)))
        yield


def _between(sleep: Callable[[], None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
        def slept(*args: Any, **kwargs: Any) -> Any:
            sleep()
            result = function(*args, **kwargs)
            sleep()
            return result

        return slept

    return wrapper


def sanitized(place: Place, variant: str) -> dict[str, Any]:
    """Train under the sanitizer, and return its reports: their number, and the first ones."""
    from torch.cuda import _sanitizer

    handler = _sanitizer.cuda_sanitizer.dispatch.event_handler
    launched = handler._handle_kernel_launch
    reports: list[str] = []

    def noted(*args: Any) -> list[Any]:
        reports.extend(str(error) for error in launched(*args))
        return []  # the sanitizer would raise the first report that is returned here

    with mock.patch.object(handler, "_handle_kernel_launch", noted):
        _sanitizer.enable_cuda_sanitizer()
        for stage in (1, 2, 3) if variant == SANITIZERS[0] else (None,):
            with ranks.echoing_ranks(WORLD_SIZE):
                training = fsdp2_training(place) if stage is None else zeroamp_training(place, stage)
                for _ in range(3):
                    training.step()
                place.synchronize()
        _sanitizer.cuda_sanitizer.disable()
    return {
        "reports": len(reports),
        "first": " ".join(reports[0].split())[:600] if reports else "",
        "all": reports[:20],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", required=True)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    place = Place(device=torch.device(given.device), small=given.small)
    if given.variant in SANITIZERS:
        print(json.dumps(sanitized(place, given.variant)))
        return
    planted("streams do not wait")
    torch.use_deterministic_algorithms(True, warn_only=True)  # an op without one shows in the variant "again"
    torch.utils.deterministic.fill_uninitialized_memory = given.variant == "memory filled"
    print(json.dumps({"bits": trained(place, given.variant)}))


if __name__ == "__main__":
    main()

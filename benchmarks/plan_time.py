"""Wall time and processor time of the command `zeroamp plan` on LLaMA-3 shapes.

python -m benchmarks.plan_time
"""

import json
import resource
import subprocess
import sys
import time

from tabulate import tabulate

CONFIG = "examples/configs/zero3_autocast_bf16.json"
CASES = [("8b", 8), ("8b", 16384), ("70b", 64), ("405b", 8), ("405b", 16384)]


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    rows = []
    for model, world_size in CASES:
        started, used = time.perf_counter(), _processor_seconds()
        command = [sys.executable, "-m", "zeroamp", "plan", CONFIG, "--model", f"examples/models/llama3-{model}"]
        command += ["--world-size", str(world_size), "--seq", "8192", "--checkpointing", "--json"]
        result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        stages = json.loads(result.stdout)["stages"]
        rows.append(
            {
                "model": model,
                "ranks": world_size,
                "seconds": round(time.perf_counter() - started, 1),
                "processor seconds": round(_processor_seconds() - used, 1),
                **{f"stage {stage['stage']} peak GiB": round(stage["peak_bytes"] / 2**30, 1) for stage in stages},
                "largest batch": ", ".join(str(stage["largest_batch"]) for stage in stages),
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    print(tabulate(rows, headers="keys", tablefmt="github"))


if __name__ == "__main__":
    main()

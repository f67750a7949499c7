"""The memory that embeddings and heads as units of their own save at stage 3, for LLaMA-3 shapes, by the dry run.

python -m benchmarks.own_units_plan [8b 70b 405b]
"""

import json
import sys
from pathlib import Path

import torch
from tabulate import tabulate
from transformers import AutoConfig, AutoModelForCausalLM

import zeroamp

CONFIG = Path("examples/configs/zero3_autocast_bf16.json")
RANKS = {"8b": 64, "70b": 256, "405b": 1024}
GIB = 2**30


def main() -> None:
    rows = []
    for name in sys.argv[1:] or RANKS:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(f"examples/models/llama3-{name}"))
        for own_units in (False, True):
            given = json.loads(CONFIG.read_text())
            policy = zeroamp.policy_from_config({**given, "zeroamp": {"own_units": own_units}})
            run = zeroamp.plan_run(
                model, policy, world_size=RANKS[name], batch=1, seq=8192, stages=(3,), checkpointing=True
            )
            memory = run.stages[0].memory
            unsharded = memory.peak("backward")["gathered parameters"]
            rows.append(
                {
                    "model": name,
                    "ranks": RANKS[name],
                    "own units": own_units,
                    **{f"{phase} peak, GiB": memory.peak_bytes(phase) / GIB for phase in ("forward", "backward")},
                    "of it unsharded parameters, GiB": unsharded / GIB,
                    "communicated, GB": sum(run.stages[0].traffic.num_bytes.values()) / 1e9,
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    print(tabulate(rows, headers="keys", tablefmt="github", floatfmt=".2f"))


if __name__ == "__main__":
    main()

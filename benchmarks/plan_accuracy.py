"""The dry run compared with real training on two ranks (gloo, CPU): memory peaks, and numbers that must be equal.

    python -m benchmarks.plan_accuracy

"Measured" is the peak of the bytes of all tensor storages in a step after the first: the smallest of four steps, since
gloo's thread may hold what it sent a moment longer. Sizes are in bytes.
"""

import torch
from tabulate import tabulate

from tests.measuring.measured import NUM_STEPS, SAMPLES, measured_step
from tests.processes.ranks import Ranks

MODELS = ("llama_tied", "hf_llama", "encoder", "conv")
EQUAL = ("parameters", "gradients", "optimizer state", "traffic")


def main() -> None:
    ranks = Ranks(2)
    rows = []
    try:
        for name in MODELS:
            for stage in (0, 1, 2, 3):
                for checkpointing in (False, True):
                    options = {"stage": stage, "threshold": 0}
                    found, predicted = ranks.run(measured_step, name, options, checkpointing)[0]
                    rows.append(
                        {
                            "model": name,
                            "stage": stage,
                            "checkpointing": checkpointing,
                            "peak measured": found["peak"],
                            "predicted": predicted["peak"],
                            "difference": f"{predicted['peak'] / found['peak'] - 1:+.3%}",
                            **{key: "equal" if found[key] == predicted[key] else "DIFFERS" for key in EQUAL},
                        }
                    )
    finally:
        ranks.stop()
    print(f"torch {torch.__version__}, 2 ranks, {SAMPLES} samples, {NUM_STEPS} steps, rank 0\n")
    print(tabulate(rows, headers="keys", tablefmt="github", intfmt=","))


if __name__ == "__main__":
    main()

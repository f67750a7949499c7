"""What low precision costs by group of modules, and whether a training with some modules in fp32 is better.

    python -m benchmarks.sensitivity --model smollm2 [--groups depth] [--budget 0.1] [--out FOLDER]
    python -m benchmarks.sensitivity --model 3.7m --curves PATTERN [PATTERN ...] [--seeds 0 1 2] --out FOLDER

One process, bf16 autocast. A model of `benchmarks.loss_curves`, or of `tests/models/families.py` with random weights.
With `--curves`, the model is trained for each seed, with and without an override that computes PATTERNs in fp32.
"""

import argparse
import json
from statistics import mean
from typing import Any

import torch

import zeroamp
from benchmarks.loss_curves import SETTINGS, batches
from benchmarks.output import add_out, emit
from tests.models.families import FAMILIES

CONFIG = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 2}}
LENGTH, SAMPLES = 64, 4
"""Tokens of a sample, and samples of an optimizer step of the curves."""
LR = 3e-3
PART = 50
"""Optimizer steps over which a row of the curves is averaged."""


def table(options: argparse.Namespace) -> None:
    """Measure a model, and print the table."""
    if options.model in SETTINGS:
        setting = SETTINGS[options.model]
        model, (tokens, _) = setting.load(0).train(), next(batches(setting.rows(LENGTH)[0], options.samples, 0))
        inputs: list[Any] = [{"input_ids": tokens, "labels": tokens, "use_cache": False}]
    else:
        family = FAMILIES[options.model]
        model, inputs = family.seeded(), [family.batch(index) for index in range(options.samples)]
    groups = options.groups[0] if options.groups in (["depth"], ["class and role"]) else options.groups
    found = zeroamp.sensitivity(zeroamp.wrap_model(model, CONFIG), inputs, groups=groups, budget=options.budget)
    emit("sensitivity", [f"```\n{found}\n```"], options.out)


def curve(model_name: str, overrides: list[dict[str, Any]], seed: int, steps: int) -> dict[str, Any]:
    """Train from `seed`. Return the losses of the steps, and the loss of held-out rows afterwards, in fp32."""
    setting = SETTINGS[model_name]
    train_rows, held_out = setting.rows(LENGTH)
    model = zeroamp.wrap_model(setting.load(seed).train(), {**CONFIG, "zeroamp": {"overrides": overrides}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=steps, pct_start=0.1)
    train, stream, losses = zeroamp.TrainStep(model, optimizer, schedule), batches(train_rows, SAMPLES, seed), []
    for _ in range(steps):
        tokens, _ = next(stream)
        train.backward(model(input_ids=tokens, labels=tokens, use_cache=False).loss)
        losses.append(train.step().loss)
    plain = zeroamp.unwrap_model(model).eval()
    with torch.no_grad():
        parts = held_out[:512, :-1].split(64)
        after = mean(float(plain(input_ids=part, labels=part, use_cache=False).loss) for part in parts)
    return {"training": losses, "held out": after}


def curves(options: argparse.Namespace) -> None:
    """Run the missing curves, one after the other, and print a table of all."""
    options.out.mkdir(parents=True, exist_ok=True)
    kinds = {"autocast": [], "recommended": [{"modules": options.curves, "compute": "fp32"}]}
    ends = range(PART, options.steps + 1, PART)
    head = ["", *(f"steps {end - PART + 1} to {end}" for end in ends), "held out"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for seed in options.seeds:
        for kind, overrides in kinds.items():
            path = options.out / f"{kind}, seed {seed}.json"
            if not path.exists():
                path.write_text(json.dumps(curve(options.model, overrides, seed, options.steps)))
            found = json.loads(path.read_text())
            means = [mean(found["training"][end - PART : end]) for end in ends]
            cells = [f"{kind}, seed {seed}", *(f"{value:.4f}" for value in (*means, found["held out"]))]
            lines.append(f"| {' | '.join(cells)} |")
    emit("sensitivity", ["\n".join(lines)], options.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--groups", default=["class and role"], nargs="+")
    parser.add_argument("--samples", type=int, default=16, help="of the batch, or batches of a family")
    parser.add_argument("--budget", type=float)
    parser.add_argument("--curves", nargs="+", metavar="PATTERN")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    add_out(parser)
    options = parser.parse_args()
    (curves if options.curves else table)(options)


if __name__ == "__main__":
    main()

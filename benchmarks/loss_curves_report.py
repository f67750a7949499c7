"""Writes the record and the picture of `benchmarks.loss_curves`. A model without curves or errors is left out.

python -m benchmarks.loss_curves_report --curves FOLDER --out FOLDER --picture FILE.svg
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
from matplotlib import pyplot
from tabulate import tabulate

from benchmarks import shared_runs
from benchmarks.loss_curves import METHODS, RANKS, SETTINGS

Results = dict[tuple[str, int], dict[int, dict[str, Any]]]
"""(method, ranks), or ("", ranks) for errors -> seed -> result."""
BASE = "autocast, fp32 sum"
COLOURS = dict(zip(METHODS, matplotlib.color_sequences["tab10"], strict=False))


def of_model(runs: list[dict[str, Any]], model: str) -> Results:
    """Return the results of a model."""
    found: Results = defaultdict(dict)
    for run in runs:
        if run["model"] == model:
            found[run.get("method", ""), run["ranks"]][run["seed"]] = run
    return found


def last(result: dict[str, Any]) -> float:
    """Return the validation loss after the last step."""
    return float(list(result["validation"].values())[-1])


def differences(curves: Results, name: str, ranks: int) -> list[float]:
    """Return the last loss minus that of the fp32 sum with the same ranks, of each seed that has both."""
    base, found = curves[BASE, ranks], {} if name == BASE else curves[name, ranks]
    return [last(found[seed]) - last(base[seed]) for seed in found if seed in base]


def spread(values: Iterable[float], form: str) -> str:
    """Return "mean (least to most)"; "" for no value."""
    values = list(values)
    return f"{mean(values):{form}} ({min(values):{form}} to {max(values):{form}})" if values else ""


def by_ranks(names: Iterable[str], cell: Callable[[str, int], str]) -> str:
    """Return a Markdown table with a row per method and a column per number of ranks."""
    rows = [[name, *(cell(name, ranks) for ranks in RANKS)] for name in names]
    headers = ["", *(f"{ranks:,} ranks" for ranks in RANKS)]
    return tabulate([row for row in rows if any(row[1:])], headers, tablefmt="github", disable_numparse=True)


def tables(model: str, curves: Results, errors: Results) -> str:
    """Return the Markdown about a model."""
    setting, per_seed = SETTINGS[model], {ranks: list(errors["", ranks].values()) for ranks in RANKS}

    def error(kind: str) -> Callable[[str, int], str]:
        return lambda name, ranks: spread(
            (each[kind][name]["all"] for each in per_seed[ranks] if name in each[kind]), ".1e"
        )

    most = max(ranks for ranks in RANKS if per_seed[ranks])
    layers = per_seed[most][0]["of the sum"][BASE]
    names = [name for name in METHODS if name in per_seed[most][0]["of the sum"]]
    of_layers = [
        [layer, *(f"{mean(each['of the sum'][name][layer] for each in per_seed[most]):.1e}" for name in names)]
        for layer in layers
    ]
    done = ", ".join(
        f"{len(seeds)} of {name}, {ranks:,} ranks" for (name, ranks), seeds in curves.items() if len(seeds) < 3
    )
    noise = spread((each["noise"]["all"] for each in per_seed[most]), ".2f")
    return "\n\n".join(
        [
            f"## {model}",
            f"{setting.steps} steps of {setting.samples:,} samples of {setting.length} tokens.",
            "Validation loss after the last step, in the numerics of the training: mean of the seeds (least to "
            f"most). {'Less than three seeds: ' + done if done else ''}",
            by_ranks(METHODS, lambda name, ranks: spread(map(last, curves[name, ranks].values()), ".4f")),
            f'The same, minus the loss of "{BASE}" with the same seed and ranks.',
            by_ranks(METHODS, lambda name, ranks: spread(differences(curves, name, ranks), "+.4f")),
            "Error of the sum: |sum - exact| / |exact| over all parameters, where exact is the fp64 sum of the same "
            "gradients of the ranks.",
            by_ranks(names, error("of the sum")),
            "Error of the gradient, against fp32 compute without autocast. The gradients of two batches of this size "
            f"differ by {noise} of their norm.",
            by_ranks(per_seed[most][0]["of all"], error("of all")),
            f"Error of the sum per layer at {most:,} ranks, mean of the seeds.",
            tabulate(of_layers, ["layer", *names], tablefmt="github", disable_numparse=True),
        ]
    )


IN_THE_DARK = "<style>@media (prefers-color-scheme: dark) { svg { filter: invert(1) hue-rotate(180deg); } }</style>"


def draw(found: dict[str, tuple[Results, Results]], picture: Path) -> None:
    """Draw a row per model: last loss by ranks, error of the sum by ranks."""
    pyplot.rcParams["font.size"] = 12  # the page is 700 pixels wide
    size = (9, 3.6 * len(found) + 0.8)
    figure, axes = pyplot.subplots(len(found), 2, figsize=size, squeeze=False, layout="constrained")
    for (model, (curves, errors)), (of_ranks, of_sums) in zip(found.items(), axes, strict=True):
        for name, colour in COLOURS.items():
            points = [(ranks, values) for ranks in RANKS if (values := differences(curves, name, ranks))]
            middle = [mean(values) for _, values in points]
            below = [mean(values) - min(values) for _, values in points]
            above = [max(values) - mean(values) for _, values in points]
            x = [ranks for ranks, _ in points]
            of_ranks.errorbar(x, middle, yerr=[below, above], color=colour, marker="o", capsize=3, label=name)
            sums = [
                (ranks, mean(each["of the sum"][name]["all"] for each in errors["", ranks].values()))
                for ranks in RANKS
                if any(name in each["of the sum"] for each in errors["", ranks].values())
            ]
            if sums:
                style = "--" if name == "autocast, bf16 ring" else "-"  # it lies on "all bf16"
                of_sums.plot(*zip(*sums, strict=True), style, color=colour, marker="o")
        of_ranks.set(title=f"{model}: loss minus that of fp32 sums", xlabel="ranks", xscale="log")
        of_ranks.set_yscale("symlog", linthresh=0.01)  # linear up to 0.01: masters in bf16 are far above
        of_ranks.set_ylim(-0.012, 0.7)
        of_ranks.set_yticks([-0.01, 0, 0.01, 0.1], ["-0.01", "0", "0.01", "0.1"])
        of_sums.set(title=f"{model}: error of the sum", xlabel="ranks", xscale="log", yscale="log")
        for axis in (of_ranks, of_sums):
            axis.set_xticks(RANKS, [f"{ranks:,}" for ranks in RANKS])
            axis.minorticks_off()
            axis.set_xlim(6, 1400)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=11)
    figure.savefig(picture)
    drawn = picture.read_text(encoding="utf-8")
    picture.write_text(drawn.replace("</style>", f"</style>{IN_THE_DARK}", 1), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curves", type=Path, required=True, help="the folder of the results")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the record: its tables.md and results")
    parser.add_argument("--picture", type=Path, required=True, help="the picture")
    options = parser.parse_args()
    runs = {name: list(shared_runs.read(options.curves / name)) for name in ("curves", "errors")}
    found = {model: (of_model(runs["curves"], model), of_model(runs["errors"], model)) for model in SETTINGS}
    found = {model: results for model, results in found.items() if all(results)}
    all_curves = [result for curves, _ in found.values() for seeds in curves.values() for result in seeds.values()]
    hours = sum(result["CPU seconds"] for result in all_curves) / 3600
    checks = [path.read_text().strip() for path in sorted(options.curves.glob("check-*.txt"))]
    parts = [f"The curves took {hours:.1f} hours of one core.", *checks]
    parts += [tables(model, *results) for model, results in found.items()]
    for name, results in runs.items():
        shared_runs.write_record(options.out / f"{name}.jsonl", results)
    (options.out / "tables.md").write_text("\n\n".join(parts) + "\n")
    draw(found, options.picture)


if __name__ == "__main__":
    main()

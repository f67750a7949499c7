"""Trains a tiny model of each family on two gloo ranks and compares every bit with one process of plain torch.

    python -m benchmarks.architectures [--only NAME ...] [--lists default auto] [--stages 0 2 3] [--out FOLDER]

10 AdamW steps with weight decay under bf16 autocast. A case is a family, a list of safe modules and a ZeRO stage. It
checks four things: the losses, and all parameters at the end, are those of `tests/oracles/families.py`; a new model
that loads the checkpoint of step 5 ends with the same losses, parameters and buffers; and the export has the trained
values, which `from_pretrained` reads back if the model is transformers'.
FOLDER gets `architectures.md` and `architectures.jsonl`. The exit status is 1 if any check fails. If the family expects
that the default list is refused, the refusal is the right result.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tabulate import tabulate

from benchmarks.family_runs import LR, NUM_STEPS, SAVED_AT, Run, train
from benchmarks.more_families import ALL_FAMILIES
from benchmarks.output import emit
from tests.models.adapters import quietly
from tests.models.families import NUM_RANKS, Family
from tests.oracles import families as oracle
from tests.processes.ranks import RankError, Ranks

LISTS = ("default", "auto")
STAGES = (0, 2, 3)
_SIDES = ("losses", "parameters", "resume", "export")


@dataclass(frozen=True, kw_only=True)
class Result:
    """The results of one case. A check is None if an error came before it."""

    family: str
    safe_list: str
    stage: int
    losses: bool | None = None
    parameters: bool | None = None
    resume: bool | None = None
    export: bool | None = None
    is_refused: bool = False
    """Whether wrapping was refused, as the family expects."""
    difference: str = ""
    """The first difference of each kind, or the error."""
    seconds: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether every check has passed."""
        return all(getattr(self, side) for side in _SIDES)


def run_case(ranks: Ranks, name: str, safe_list: str, stage: int, expected: oracle.Expected) -> Result:
    """Run one case on two ranks."""
    begun_s = time.monotonic()
    case = {"family": name, "safe_list": safe_list, "stage": stage}
    with tempfile.TemporaryDirectory() as folder:
        try:
            runs = ranks.run(train, name, safe_list, stage, folder)
        except RankError as error:
            text, seconds = _first_error(str(error)), time.monotonic() - begun_s
            return Result(**case, is_refused=_expects(name, safe_list, text), difference=text, seconds=seconds)
        found = {
            "losses": _first_loss(runs, expected),
            "parameters": _first_tensor(runs[0].parameters, expected.parameters),
            "resume": _first_of_resume(runs),
            "export": _first_of_export(ALL_FAMILIES[name], Path(folder) / "export", runs[0].parameters),
        }
    differences = "; ".join(f"{side}: {text}" for side, text in found.items() if text is not None)
    answers = {side: text is None for side, text in found.items()}
    return Result(**case, **answers, difference=differences, seconds=time.monotonic() - begun_s)


@quietly
def expected_of(name: str) -> oracle.Expected:
    """Train the family in this process with plain torch."""
    return oracle.train(ALL_FAMILIES[name], num_steps=NUM_STEPS, lr=LR)


def _first_loss(runs: list[Run], expected: oracle.Expected) -> str | None:
    for step in range(NUM_STEPS):
        for rank, run in enumerate(runs):
            ours, theirs = run.losses[step], expected.losses[rank][step]
            if ours != theirs:
                return f"step {step + 1}, rank {rank}: {ours!r} instead of {theirs!r}"
    return None


def _first_tensor(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> str | None:
    if ours.keys() != theirs.keys():
        return f"other names: {sorted(ours.keys() ^ theirs.keys())[:3]}"
    differing = [fqn for fqn in ours if not torch.equal(ours[fqn], theirs[fqn])]
    if not differing:
        return None
    first = differing[0]
    if ours[first].shape != theirs[first].shape:
        return f"{first} has shape {tuple(ours[first].shape)} instead of {tuple(theirs[first].shape)}"
    by = float((ours[first].double() - theirs[first].double()).abs().max())
    return f"{len(differing)} of {len(ours)}, first {first} by {by:.2g}"


def _first_of_resume(runs: list[Run]) -> str | None:
    for rank, run in enumerate(runs):
        expected = run.losses[SAVED_AT:]
        if run.resumed_losses != expected:
            step = next(i for i, (a, b) in enumerate(zip(run.resumed_losses, expected, strict=True)) if a != b)
            return f"rank {rank}: the loss of step {SAVED_AT + step + 1}"
        text = _first_tensor(run.resumed, run.parameters | run.buffers)
        if text is not None:
            return f"rank {rank}: {text}"
    return None


def _first_of_export(family: Family, folder: Path, parameters: dict[str, torch.Tensor]) -> str | None:
    """Load the export as a user does, into a model with other weights. Return the first difference, or None."""
    try:
        model = _reloaded(family, folder)
    except Exception as error:
        return f"{type(error).__name__}: {_first_error(str(error))}"
    ours = {fqn: parameter.detach() for fqn, parameter in model.named_parameters()}
    return _first_tensor(ours, parameters)


@quietly
def _reloaded(family: Family, folder: Path) -> torch.nn.Module:
    from safetensors.torch import load_model
    from transformers import PreTrainedModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = family.seeded(seed=2)
    if not isinstance(model, PreTrainedModel):
        load_model(model, folder / "model.safetensors")
        return model
    model, info = type(model).from_pretrained(folder, output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        raise ValueError(f"from_pretrained reports {info}")
    return model


def _first_error(text: str) -> str:
    """Return the first rank's error from the tracebacks of several ranks, or the first line of an error's text."""
    of_rank = text.split("\n--- ")[0]
    lines = [line for line in of_rank.splitlines() if line.strip() and not line.startswith((" ", "---", "Traceback"))]
    return (lines[-1] if "Traceback" in of_rank else lines[0]) if lines else text


def _expects(name: str, safe_list: str, text: str) -> bool:
    words = ALL_FAMILIES[name].refused_with_default_list
    return safe_list == "default" and bool(words) and words in text


def results(ranks: Ranks, names: list[str], lists: list[str], stages: list[int]) -> Iterator[Result]:
    """Run all cases."""
    for name in names:
        expected = expected_of(name)
        for safe_list in lists:
            for stage in stages:
                yield run_case(ranks, name, safe_list, stage, expected)


def _markdown(found: list[Result]) -> list[str]:
    tried = [result for result in found if not result.is_refused]
    num_exact = sum(result.is_exact for result in tried)
    inexact = dict.fromkeys(result.family for result in tried if not result.is_exact)
    refused = dict.fromkeys(f"{result.family} ({result.safe_list})" for result in found if result.is_refused)
    head = (
        f"{len({result.family for result in found})} families, {len(found)} cases: {num_exact} exact, "
        f"{len(tried) - num_exact} not, {len(found) - len(tried)} refused as expected. "
        f"Not exact: {', '.join(inexact) or 'none'}. Refused: {', '.join(refused) or 'none'}."
    )
    rows = [[r.family, r.safe_list, r.stage, *_words(r), r.difference.replace("|", "/")] for r in found]
    headers = ["family", "safe list", "stage", *_SIDES, "first difference"]
    return [head, tabulate(rows, headers=headers, tablefmt="github")]


def _words(result: Result) -> list[str]:
    error = "refused" if result.is_refused else "**error**"
    return [{True: "equal", False: "**differs**", None: error}[getattr(result, side)] for side in _SIDES]


def main() -> None:
    """Run the chosen cases. The exit status is 1 if one of them is not exact."""
    arguments = _arguments()
    torch.set_num_threads(1)
    ranks = Ranks(NUM_RANKS)
    found = []
    for result in results(ranks, arguments.only or list(ALL_FAMILIES), arguments.lists, arguments.stages):
        found.append(result)
        print(f"{result.family} {result.safe_list} {result.stage}: {result.difference or 'exact'}", flush=True)
    ranks.stop()
    emit("architectures", _markdown(found), arguments.out)
    if arguments.out is not None:
        lines = [json.dumps({**asdict(result), "seconds": round(result.seconds, 2)}) for result in found]
        (arguments.out / "architectures.jsonl").write_text("\n".join(lines) + "\n")
    sys.exit(not all(result.is_exact or result.is_refused for result in found))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ALL_FAMILIES, help="these families alone")
    parser.add_argument("--lists", nargs="+", choices=LISTS, default=LISTS)
    parser.add_argument("--stages", nargs="+", type=int, choices=(0, 1, 2, 3), default=STAGES)
    parser.add_argument("--out", type=Path, help="folder that the table and the cases are written to")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Ranks that differ before training or in a step: one error on all, which names what differs and on which rank."""

import pytest
import torch
import torch.distributed as dist

from benchmarks.differences.kinds import CONFIG, HARMLESS, MODEL, OPTIMIZER, STEP
from benchmarks.differences.training import NUM_STEPS, train
from tests.selection import slow_but
from zeroamp.policies.errors import ConfigError, WrapError
from zeroamp.wrapping.run_alike import run_alike

KINDS = {"config": CONFIG, "model": MODEL, "optimizer": OPTIMIZER, "step": STEP, "harmless": HARMLESS}
SHARED = ("accumulation count", "gradient clipping", "depth", "tying", "a frozen layer", "lr", "a scheduler")
"""Kinds that are tried at the first and the last stage that they list, as those of a step; the others at the first."""


def _all_kinds(what):
    """Try kind after kind in one process group: return the error of each, as class and text."""
    found = {}
    for name, kind in KINDS[what].items():
        for stage in sorted({kind.stages[0], kind.stages[-1 if name in SHARED or what == "step" else 0]}):
            try:
                found[name, stage] = "", f"{train(kind, stage)} steps"
            except Exception as error:
                found[name, stage] = type(error).__name__, str(error)
    return found


@pytest.mark.parametrize("what", slow_but(["config", "model", "optimizer", "step"], "config", "model", "step"))
def test_each_kind_is_one_error_on_all_ranks_that_names_it(ranks2, what):
    first, second = ranks2.run(_all_kinds, what)
    assert first == second
    wrong = {
        run: (error, text)
        for run, (error, text) in first.items()
        if error != (KINDS[what][run[0]].error or "")
        or KINDS[what][run[0]].names not in text
        or (error != "" and "rank" not in text)
    }
    assert wrong == {}


def test_what_one_rank_shows_of_itself_may_differ(ranks2):
    for found in ranks2.run(_all_kinds, "harmless"):
        assert set(found.values()) == {("", f"{NUM_STEPS} steps")}


def _compared(case):
    """Call `run_alike` on 4 ranks; return the error's class and text, or the result."""
    rank = dist.get_rank()

    def action():
        if case == "two errors" and rank in (1, 2):
            raise (ConfigError("x") if rank == 1 else OSError("y"))
        if case == "the same error":
            raise OSError("full")
        values = {
            "equal": {"a": "1"},
            "three values": {"a": "1", "b": str(max(rank - 1, 0))},
            "absent on the first": {"a": "1", **({"b": "2"} if rank else {})},
            "many": {f"key {number}": str(rank == 3) for number in range(9)},
        }
        return rank, values.get(case, {})

    try:
        return run_alike(
            action,
            what="This",
            remedy="Do that.",
            error_type=WrapError,
            group=None,
            device=torch.device("cpu"),
        )
    except Exception as error:
        return type(error), str(error)


CASES = {
    "three values": (
        WrapError,
        "This differs between ranks: b is 0 on ranks 0, 1, but 1 on rank 2 and 2 on rank 3. Do",
    ),
    "absent on the first": (WrapError, "b is absent on rank 0, but 2 on ranks 1, 2, 3."),
    "many": (WrapError, "key 3 is False on ranks 0, 1, 2, but True on rank 3; and 5 more. Do that."),
    "two errors": (WrapError, "This failed on rank 1: x; rank 2: OSError: y"),
    "the same error": (OSError, "full"),
}


def _all_cases():
    return {case: _compared(case) for case in ("equal", *CASES)}


def test_differences_and_errors_are_told_with_their_ranks(ranks4):
    for rank, found in enumerate(ranks4.run(_all_cases)):
        assert found.pop("equal") == rank
        for case, (error_type, text) in found.items():
            assert error_type is CASES[case][0], case
            assert CASES[case][1] in text, text

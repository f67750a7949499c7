"""The check of zeroamp on one GPU: it passes on the CPU at small size, and each part fails with a planted fault."""

import json
import os
import sys
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroamp
from benchmarks.gpu_check import __main__ as runner
from benchmarks.gpu_check import correctness, disturbance, faults, host_waits, memory, nccl, step_times, sums, two_ranks
from benchmarks.gpu_check.verdict import Place, Result
from tests.oracles import one_process
from tests.selection import slow_but

SMALL = Place(device=torch.device("cpu"), small=True)
ON_CUDA = Place(device=torch.device("cuda"))


@pytest.fixture
def plant(monkeypatch):
    """Return a function that plants a fault. Methods that faults replace are restored after the test."""
    for name in ("step", "backward"):
        monkeypatch.setattr(zeroamp.TrainStep, name, getattr(zeroamp.TrainStep, name))
    return lambda name: monkeypatch.setenv(faults.VARIABLE, name)


FAULTS = {
    "wrong bit": (correctness, "autocast bf16, stage 0: not the bits of plain torch (1 parameters differ)"),
    "host read": (host_waits, "waits in 2 forwards, first at benchmarks/gpu_check/faults.py"),
    "host read in step": (host_waits, "waits in 2 steps, first at benchmarks/gpu_check/faults.py"),
    "order of the sum": (sums, "8 rows of bfloat16: the loop differs in"),
    "no update": (step_times, "one rank: the last loss of zeroamp 3 is"),
    "memory": (memory, "stage 2: the measured peak is 1.5"),
    "wrong bit when disturbed": (disturbance, "sleep: other bits than undisturbed (stage 0 of 8, stage 1 of 8"),
    "wrong bit of two ranks": (two_ranks, "rank 0, stage 0: change differ by"),
}
"""Fault -> the part that must find it, and its words."""


@pytest.mark.parametrize("fault", slow_but(FAULTS, "wrong bit", "host read", "order of the sum"))
def test_a_planted_fault_is_found(plant, monkeypatch, fault):
    monkeypatch.setattr(correctness, "cuda_tests", lambda: ([], "none"))
    monkeypatch.setattr(correctness, "MODES", {"autocast bf16": ({}, {})})
    monkeypatch.setattr(host_waits, "CASES", {"stage 3": {"stage": 3}})
    monkeypatch.setattr(disturbance, "EVERYWHERE", {"plain": {}, "memory filled": {}, disturbance.SLEEPING: {}})
    part, words = FAULTS[fault]
    if part in (correctness, host_waits, sums):
        assert part.run(SMALL).verdict == "ok"
    plant(fault.removesuffix(" of two ranks"))
    result = part.run(SMALL)
    assert result.verdict == "FAILED"
    assert words in result.reason
    if part is disturbance:  # the fault is in one of the processes, and the others have the same bits
        assert len(result.values["failures"]) == 1
    if part is two_ranks:  # all but the one element has the bits of plain torch
        (rows,) = result.tables.values()
        assert [[row[key] for key in ("losses", "norms", "differing shards")] for row in rows] == [[0, 0, 1]] * 8


def test_differences_on_cuda_have_limits():
    fine = {"losses": correctness.LOSSES, "norms": correctness.NORMS, "change": correctness.PARAMETERS}
    assert correctness.wrong(fine, ON_CUDA) == []
    for key, value in fine.items():
        assert correctness.wrong({**fine, key: 1.01 * value}, ON_CUDA)[0].startswith(f"{key} differ")
        assert correctness.wrong({**fine, key: float("nan")}, ON_CUDA)


def test_every_way_to_read_a_value_is_seen():
    places = []
    with host_waits._watch(SMALL, places):
        for read in ("tolist", "numpy", "item", "nonzero", "__bool__", "__float__"):
            getattr(torch.ones(1), read)()
    assert len(places) == 6
    assert all("tests/test_gpu_check.py:" in place for place in places)


@pytest.mark.slow
def test_a_part_that_ends_or_hangs_fails_and_says_why(plant):
    plant("crash")
    assert runner.run_part("sums", SMALL, limit_s=100).reason.startswith("ended with code -9: ")
    plant("hang")
    begin = time.monotonic()
    result = runner.run_part("sums", SMALL, limit_s=4)
    assert result.line("sums") == "sums: FAILED - did not end in 4 s"
    assert time.monotonic() - begin < 20


def _main(monkeypatch, result_of, *arguments):
    """Run the runner on the results that `result_of(name)` returns; return its exit code."""
    monkeypatch.setattr(runner, "run_part", lambda name, place, limit_s: result_of(name))
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", *arguments])
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        runner.main()
    return int(ended.value.code)


def test_the_exit_code_and_a_line_per_part(monkeypatch, capsys, tmp_path):
    tables = {"A table": [{"a": 1}]}
    results = {name: Result.of([], "fine", not_measured="b", tables=tables) for name in runner.PARTS}
    assert _main(monkeypatch, results.get, "--out", str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{name}: ok - fine; not measured: b" for name in runner.PARTS]
    text, values = (tmp_path / "README.md").read_text(), json.loads((tmp_path / "values.json").read_text())
    assert "## sums: A table" in text
    assert values["environment"]["torch"] == torch.__version__
    assert set(values["parts"]) == set(runner.PARTS)
    results["memory"] = Result.of(["too much"], "")
    assert _main(monkeypatch, results.get) == 1
    assert "memory: FAILED - too much" in capsys.readouterr().out
    assert _main(monkeypatch, results.get, "--part", "sums") == 0, "only the parts that ran count"
    capsys.readouterr()
    assert _main(monkeypatch, None, "--whole", "0.5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{name}: not measured - the 0 s of the whole check are over" for name in runner.PARTS]


def _answered(name, folder, fault):
    """Run one case of the part `nccl` on this rank, with a planted fault. The process group is that of the tests."""
    os.environ.update({faults.VARIABLE: fault, "LOCAL_RANK": os.environ["RANK"]})
    dist.new_group([0])
    with mock.patch.object(zeroamp.TrainStep, "step", zeroamp.TrainStep.step):
        return nccl.answered(name, SMALL, folder)


@pytest.fixture(scope="module")
def expected_of_ranks():
    return one_process.train(nccl.MODEL, world_size=4, num_steps=2, clip=nccl.CLIP)


GPU_0 = "rank 1 has contexts on the GPUs [0, 1], not on 1 alone"
OF_LAYOUTS = {"wrong bit": "rank 0: change differ by"}
OF_CASES = {
    nccl.FIRST_RUN: {"no update": "20 printed losses must fall", "context on GPU 0": GPU_0},
    **dict.fromkeys(nccl.LAYOUTS, OF_LAYOUTS),
    "two levels": {**OF_LAYOUTS, "one level": "its collectives ran in one level"},
    nccl.SAVE: {"wrong bit": "rank 0: 1 loaded shards are not those at the save", "context on GPU 0": GPU_0},
    nccl.REDUCTIONS: {"order of the sum": "rank 3: other bits than the tree in the sum of bf16"},
}
"""Case -> fault -> the failure that it must give."""


@pytest.mark.slow
@pytest.mark.parametrize("name", nccl.CASES)
def test_each_case_of_several_ranks_passes_and_finds_its_faults(ranks2, ranks4, expected_of_ranks, tmp_path, name):
    is_first = name == nccl.FIRST_RUN  # this one passes in the next test
    for number, (fault, text) in enumerate((({} if is_first else {"": ""}) | OF_CASES[name]).items()):
        (tmp_path / str(number)).mkdir()
        answers = (ranks2 if is_first else ranks4).run(_answered, name, tmp_path / str(number), fault)
        _, failures = nccl.judged(name, answers, expected_of_ranks, SMALL)
        assert any(failure.startswith(text) for failure in failures) if fault else not failures, (fault, failures)


@pytest.mark.slow
def test_torchrun_starts_the_ranks_of_a_part(monkeypatch):
    monkeypatch.setattr(nccl, "CASES", (nccl.FIRST_RUN,))
    monkeypatch.setattr(nccl, "RANKS_ON_CPU", 2)
    assert nccl.run(SMALL).line("nccl").startswith("nccl: ok - 1 cases on 2 ranks")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_check_of_one_gpu_runs_on_a_cpu(monkeypatch, capsys, tmp_path):
    """The other parts start processes of their own: above, each passes but for a planted fault."""
    run_part, names = runner.run_part, ("correctness", "host-waits", "sums", "step-times", "memory")

    def result_of(name):
        if name == "sums":
            return run_part(name, SMALL, limit_s=100)
        runner.answer_part(name, SMALL, tmp_path / name)  # in this process, which has imported torch
        return Result(**json.loads((tmp_path / name).read_text()))

    parts = [argument for name in names for argument in ("--part", name)]
    code = _main(monkeypatch, result_of, "--small", "--out", str(tmp_path / "out"), *parts)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" - ")[0] for line in lines] == [f"{name}: ok" for name in names], lines
    assert code == 0
    summary = (tmp_path / "out" / "README.md").read_text().partition("\n## ")[0]
    assert summary.count("| ok ") == len(names)

"""The check of zeroamp on one GPU: it passes on the CPU at small size, and each part fails with a planted fault."""

import json
import os
import shlex
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroamp
from benchmarks import step_memory, throughput
from benchmarks.gpu_check import __main__ as runner
from benchmarks.gpu_check import correctness, disturbance, faults, host_waits, memory, nccl, step_times, sums, two_ranks
from benchmarks.gpu_check.training import zeroamp_training
from benchmarks.gpu_check.verdict import Place, Result
from benchmarks.peers.engines import builder
from benchmarks.peers.model import SHAPES, Decoder
from benchmarks.peers.options import Options
from tests.measuring.sources import ROOT
from tests.oracles import one_process
from zeroamp.hooks.collectives import tree_sum

SMALL = Place(device=torch.device("cpu"), small=True)
ON_CUDA = Place(device=torch.device("cuda"))


@pytest.fixture
def plant(monkeypatch):
    """Return a function that plants a fault. Methods that faults replace are restored after the test."""
    for name in ("step", "backward"):
        monkeypatch.setattr(zeroamp.TrainStep, name, getattr(zeroamp.TrainStep, name))
    return lambda name: monkeypatch.setenv(faults.VARIABLE, name)


@pytest.fixture
def without_tests(monkeypatch):
    monkeypatch.setattr(correctness, "cuda_tests", lambda: ([], "none"))


def test_one_rank_has_the_bits_of_plain_torch(without_tests):
    result = correctness.run(SMALL)
    assert result.verdict == "ok", result.reason
    assert "16 runs of 2 steps against plain torch, 16 with its bits" in result.reason


def test_a_wrong_bit_of_a_parameter_is_found(plant, without_tests, monkeypatch):
    monkeypatch.setattr(correctness, "MODES", {"autocast bf16": ({}, {})})
    plant("wrong bit")
    result = correctness.run(SMALL)
    assert result.verdict == "FAILED"
    assert "llama_untied, autocast bf16, stage 0: not the bits of plain torch (1 parameters differ)" in result.reason
    assert "and 1 more" in result.reason


def test_differences_on_cuda_have_limits():
    fine = {"losses": correctness.LOSSES, "norms": correctness.NORMS, "change": correctness.PARAMETERS}
    assert correctness.wrong(fine, ON_CUDA) == []
    for key, value in fine.items():
        assert correctness.wrong({**fine, key: 1.01 * value}, ON_CUDA)[0].startswith(f"{key} differ")
        assert correctness.wrong({**fine, key: float("nan")}, ON_CUDA)


def test_the_host_waits_for_nothing_before_the_update():
    result = host_waits.run(SMALL)
    assert result.verdict == "ok", result.reason
    (rows,) = result.tables.values()
    assert {row["ranks"] for row in rows} == {"alone", "one of 8"}


@pytest.mark.parametrize(("fault", "phase"), [("host read", "forward"), ("host read in step", "step")])
def test_a_host_read_is_found(plant, fault, phase, monkeypatch):
    monkeypatch.setattr(host_waits, "CASES", {"stage 3": {"stage": 3}})
    plant(fault)
    result = host_waits.run(SMALL)
    assert result.verdict == "FAILED"
    assert f"waits in 2 {phase}s, first at benchmarks/gpu_check/faults.py" in result.reason


def test_a_count_that_sees_nothing_is_no_verdict(monkeypatch):
    monkeypatch.setattr(host_waits, "_WAITING", set())
    assert "would mean nothing" in host_waits.run(SMALL).reason
    assert host_waits.run(SMALL).verdict == "FAILED"


@pytest.mark.parametrize("read", ["tolist", "numpy", "item", "nonzero", "__bool__", "__float__"])
def test_every_way_to_read_a_value_is_seen(read):
    places = []
    with host_waits._watch(SMALL, places):
        getattr(torch.ones(1), read)()
    assert len(places) == 1
    assert "tests/test_gpu_check.py:" in places[0]


def test_the_sum_has_the_bits_of_the_tree():
    result = sums.run(SMALL)
    assert result.verdict == "ok", result.reason
    assert "not measured: the Triton kernel and its bandwidth" in result.reason


def test_a_sum_in_another_order_is_found(plant):
    plant("order of the sum")
    result = sums.run(SMALL)
    assert result.verdict == "FAILED"
    assert "8 rows of bfloat16: the loop differs in" in result.reason


def test_a_sum_that_is_wrong_at_odd_sizes_is_found(monkeypatch):
    def in_fours(rows, output, divide_by):  # forgets what is left of a row
        whole = output.numel() // 4 * 4
        output[whole:] = 0
        return tree_sum_loop(rows[:, :whole], output[:whole], divide_by)

    tree_sum_loop = tree_sum._loop
    monkeypatch.setattr(tree_sum, "_loop", in_fours)
    result = sums.run(SMALL)
    assert result.verdict == "FAILED"
    assert "rows of 1003" in result.reason


@pytest.mark.slow
def test_step_times_of_all_engines_are_measured():
    result = step_times.run(SMALL)
    assert result.verdict == "ok", result.reason
    alone, fake = result.tables.values()
    assert [row["engine"] for row in alone] == list(step_times.ENGINES)
    assert [row["engine"] for row in fake] == list(step_times.ENGINES[:3])
    assert all(row["tokens/s"] for row in alone)


@pytest.mark.slow
def test_another_loss_is_found(plant):
    plant("no update")
    result = step_times.run(SMALL)
    assert result.verdict == "FAILED"
    assert "one rank: the last loss of zeroamp 3 is" in result.reason


def test_steps_that_take_too_long_are_found():
    theirs = [1.0, 1.1, 0.9, 1.0, 1.05]
    assert step_times.too_slow({step_times.OURS: [1.08 * value for value in theirs], step_times.THEIRS: theirs}) == []
    (text,) = step_times.too_slow({step_times.OURS: [1.2 * value for value in theirs], step_times.THEIRS: theirs})
    assert text == "a step of zeroamp 3 takes 1.200 of one of FSDP2 autocast reshard, more than 1.1"


def test_memory_is_that_of_the_plan():
    result = memory.run(SMALL)
    assert result.verdict == "ok", result.reason
    (rows,) = result.tables.values()
    for row in rows:
        assert float(row["allocated / planned"]) == pytest.approx(1, abs=0.01)


@pytest.mark.slow
def test_memory_above_the_plan_is_found(plant):
    plant("memory")
    result = memory.run(SMALL)
    assert result.verdict == "FAILED"
    assert "stage 2: the measured peak is 1.5" in result.reason


def test_on_cuda_too_little_memory_and_released_caches_are_found_too():
    assert memory.wrong(3, 1.0, 0, ON_CUDA) == []
    assert memory.wrong(3, 0.5, 0, ON_CUDA) == ["stage 3: the measured peak is 0.500 of the planned one"]
    assert memory.wrong(3, 1.0, 2, ON_CUDA) == ["stage 3: the allocator released its caches 2 times"]


@pytest.mark.slow
def test_a_part_that_ends_or_hangs_fails_and_says_why(plant):
    plant("crash")
    assert runner.run_part("sums", SMALL, limit_s=100).reason.startswith("ended with code -9: ")
    plant("hang")
    begin = time.monotonic()
    result = runner.run_part("sums", SMALL, limit_s=4)
    assert result.line("sums") == "sums: FAILED - did not end in 4 s"
    assert time.monotonic() - begin < 20


@pytest.mark.slow
def test_a_part_ends_with_its_runner(plant):
    plant("hang")
    code = (
        "from tests.test_gpu_check import SMALL, runner; from unittest import mock; import subprocess\n"
        "started = subprocess.Popen\n"
        "def popen(*args, **more):\n"
        "    process = started(*args, **more); print(process.pid, flush=True); return process\n"
        "with mock.patch('subprocess.Popen', popen): runner.run_part('sums', SMALL, limit_s=100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        pid = int(running.stdout.readline())
        running.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()


def test_a_part_that_raises_fails_with_the_words_of_the_error(tmp_path, monkeypatch):
    def broken(place):
        raise ValueError("two\nlines")

    monkeypatch.setattr(sums, "run", broken)
    runner.answer_part("sums", SMALL, tmp_path / "answer")
    assert json.loads((tmp_path / "answer").read_text())["reason"] == "ValueError: two lines"


def test_a_part_that_runs_out_of_memory_is_not_measured(tmp_path, monkeypatch):
    def too_large(place):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sums, "run", too_large)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 79 * 2**30)
    runner.answer_part("sums", SMALL, tmp_path / "answer")
    result = json.loads((tmp_path / "answer").read_text())
    assert (result["verdict"], result["reason"]) == ("not measured", "out of memory: it needs more than 79 GiB")


def _main(monkeypatch, results, *arguments):
    """Run the runner on made-up parts; return its exit code."""
    monkeypatch.setattr(runner, "run_part", lambda name, place, limit_s: results[name])
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", *arguments])
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        runner.main()
    return int(ended.value.code)


def test_the_exit_code_and_a_line_per_part(monkeypatch, capsys, tmp_path):
    tables = {"A table": [{"a": 1}]}
    results = {name: Result.of([], "fine", not_measured="b", tables=tables) for name in runner.PARTS}
    assert _main(monkeypatch, results, "--out", str(tmp_path)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{name}: ok - fine; not measured: b" for name in runner.PARTS]
    text, values = (tmp_path / "README.md").read_text(), json.loads((tmp_path / "values.json").read_text())
    assert "## sums: A table" in text
    assert values["environment"]["torch"] == torch.__version__
    assert set(values["parts"]) == set(runner.PARTS)
    results["memory"] = Result.of(["too much"], "")
    assert _main(monkeypatch, results) == 1
    assert "memory: FAILED - too much" in capsys.readouterr().out
    assert _main(monkeypatch, results, "--part", "sums") == 0, "only the parts that ran count"


def test_parts_that_no_time_is_left_for_are_not_measured(monkeypatch, capsys):
    assert _main(monkeypatch, {}, "--whole", "0.5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{name}: not measured - the 0 s of the whole check are over" for name in runner.PARTS]


def test_all_parts_and_the_installation_fit_into_ten_minutes():
    assert runner.WHOLE_S <= 600 - 30
    limits = {name: part.limit_s for name, part in runner.PARTS.items()}
    assert limits.pop("nccl") == runner.SEVERAL_GPUS_S == 180, "on machines with several GPUs only"
    assert sum(limits.values()) <= 1.2 * runner.WHOLE_S, "no part expects its whole limit"


@pytest.mark.slow
def test_every_part_of_the_larger_benchmark_is_bounded_and_its_arguments_are_valid(monkeypatch):
    done = subprocess.run(
        ["make", "--dry-run", "bench-gpu"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    commands = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("timeout ")]
    assert len(commands) == 7
    for command in commands:
        assert command[1] == "590"
        assert command[4] in ("benchmarks.step_time", "benchmarks.step_memory")
        monkeypatch.setattr(sys, "argv", ["module", *command[5:]])
        options = Options.from_command_line("")
        assert all(callable(builder(name)) for name in options.engines)


def test_flops_are_counted_as_published():
    with torch.device("meta"):
        model = Decoder(SHAPES["1b"], 16)
    weights = sum(parameter.numel() for parameter in model.parameters()) - model.embed.weight.numel()
    assert throughput.flops_per_token(SHAPES["1b"], 0) == 6 * weights
    # torchtitan counts 6 x 7.505e9 and 12 x 32 x 32 x 128 x 8192 for LLaMA-3 8B with 8,192 tokens
    assert throughput.flops_per_token(SHAPES["8b"], 8192) == pytest.approx(45.0e9 + 12.9e9, rel=2e-3)


def test_a_device_has_the_peak_of_its_data_sheet():
    for name, tflops in (("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-40GB", 312)):
        assert throughput.peak_named(name) == tflops * 1e12
    assert throughput.peak_named("Some GPU") is None


def test_the_memory_of_a_gpu_has_columns_of_its_own():
    mib = step_memory.MIB
    found = {"held": mib, "peak": 2 * mib, "planned": 3 * mib, "reserved": 4 * mib, "retries": 1}
    (row,) = step_memory.rows({"zeroamp 3": found})
    assert (row["planned, MiB"], row["reserved, MiB"], row["allocations tried again"]) == ("3.0", "4.0", "1")


@pytest.mark.slow
def test_disturbed_runs_have_the_same_bits():
    result = disturbance.run(SMALL)
    assert result.verdict == "ok", result.reason
    assert "5 cases with the same bits in 4 variants" in result.reason


@pytest.mark.slow
def test_other_bits_in_a_disturbed_run_are_found(plant, monkeypatch):
    monkeypatch.setattr(disturbance, "EVERYWHERE", {"plain": {}, "again": {}})
    plant("wrong bit when disturbed")
    result = disturbance.run(SMALL)
    cases = ", ".join(f"stage {stage} of 8" for stage in (0, 1, 2, 3))
    assert result.line("x") == f"x: FAILED - again: other bits than undisturbed ({cases})"


def test_reports_of_the_sanitizer_count_where_fsdp2_alone_has_none():
    ours, theirs = disturbance.SANITIZERS
    answers = {ours: {"reports": 2, "first": "a race"}, theirs: {"reports": 0}}
    assert disturbance._reported(answers) == ["the sanitizer has 2 reports, and none of FSDP2 alone: a race"]
    answers[theirs]["reports"] = 3
    assert disturbance._reported(answers) == []
    answers[ours] = {"error": "it broke"}
    assert disturbance._reported(answers) == ["sanitizer: it broke"]
    answers[theirs] = {"error": "it broke"}
    assert disturbance._reported(answers) == []
    assert disturbance._summary(answers) == "; reports of the sanitizer: it broke, of FSDP2 alone: it broke"


@pytest.mark.slow
def test_two_ranks_have_the_bits_of_plain_torch_and_a_wrong_one_is_found(plant):
    result = two_ranks.run(SMALL)
    assert result.verdict == "ok", result.reason
    assert "8 runs of 2 steps, 8 with the bits of plain torch" in result.reason
    plant("wrong bit")
    result = two_ranks.run(SMALL)
    assert result.verdict == "FAILED"
    assert "rank 0, stage 0: change differ by" in result.reason


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


@pytest.mark.parametrize("name", nccl.CASES)
def test_each_case_of_several_ranks_passes_and_finds_its_faults(ranks4, expected_of_ranks, tmp_path, name):
    for number, (fault, text) in enumerate({"": "", **OF_CASES[name]}.items()):
        (tmp_path / str(number)).mkdir()
        answers = ranks4.run(_answered, name, tmp_path / str(number), fault)
        _, failures = nccl.judged(name, answers, expected_of_ranks, SMALL)
        assert any(failure.startswith(text) for failure in failures) if fault else not failures, (fault, failures)


def _on_two_ranks(name):
    dist.new_group([0])
    return nccl.answered(name, SMALL, None)


def test_layouts_run_on_two_ranks_too(ranks2):
    expected = one_process.train(nccl.MODEL, world_size=2, num_steps=2, clip=nccl.CLIP)
    for name in [name for name, layout in nccl.LAYOUTS.items() if layout.least == 2]:
        assert nccl.judged(name, ranks2.run(_on_two_ranks, name), expected, SMALL)[1] == []


def test_several_ranks_need_several_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = nccl.run(ON_CUDA)
    assert (result.verdict, result.reason) == ("not measured", "it needs two GPUs, and torch sees 1 here")


def test_a_reduction_that_takes_too_long_is_found():
    ours, bf16, fp32 = "all-to-all and sum of bf16", "reduce-scatter of bf16", "reduce-scatter of fp32"
    answers = [
        {"times": [{"MB": size, ours: seconds, bf16: 0.02, fp32: 0.03} for size in (16, 436)]}
        for seconds in (0.01, 0.04)
    ]
    rows = nccl.slowest(answers)
    assert rows[1] == {
        "MB": 436,
        ours: "40.000",
        bf16: "20.000",
        fp32: "30.000",
        f"/ {bf16}": "2.00",
        f"/ {fp32}": "1.33",
    }
    (text,) = nccl.too_slow(rows)
    assert text.startswith("436 MB: all-to-all and sum of bf16 take 1.33 of the time of a reduce-scatter of fp32")


def test_contexts_are_those_that_torch_reports(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index in (1, 3), raising=False)
    assert nccl._gpus_with_context(ON_CUDA) == [1, 3]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_ends_does_not_end_the_other_cases(plant):
    plant("a rank ends")
    result = nccl.run(SMALL)
    assert result.verdict == "FAILED"
    rows = next(iter(result.tables.values()))
    assert all("rank 1 did not answer" in row["found"] for row in rows if row["case"] in nccl.LAYOUTS)
    assert {row["case"]: row["verdict"] for row in rows} == {
        name: "FAILED" if name in nccl.LAYOUTS else "ok" for name in nccl.CASES
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_check_runs_on_a_cpu(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--small", "--out", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(": ")[0] for line in done.stdout.splitlines()] == list(runner.PARTS)
    assert all(": ok - " in line for line in done.stdout.splitlines())
    summary = (tmp_path / "README.md").read_text().partition("\n## ")[0]
    assert summary.count("| ok ") == len(runner.PARTS)


class OnStandIns(Place):
    """A place on CUDA with fakes for `torch.cuda`, so that the code for CUDA runs once without a GPU."""

    __slots__ = ()

    @property
    def on_cuda(self):
        return True


class _Event:
    def __init__(self, enable_timing=False):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


@pytest.fixture
def stand_ins(monkeypatch):
    numbers = {"num_alloc_retries": 0}
    properties = SimpleNamespace(name="NVIDIA H100", total_memory=85 * 10**9, multi_processor_count=132)
    for name, value in {
        "Event": _Event,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_device_properties": lambda _: properties,
        "get_device_name": lambda _: properties.name,
        "set_sync_debug_mode": lambda mode: None,
        "memory_stats": lambda: numbers,
        "memory_snapshot": lambda: [{"stream": 0, "total_size": 1}, {"stream": 7, "total_size": 2}],
        "memory_allocated": lambda: 10 * 2**20,
        "max_memory_allocated": lambda: 24 * 2**20,
        "max_memory_reserved": lambda: 30 * 2**20,
        "reset_peak_memory_stats": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(throughput, "peak_of", lambda device: 989e12)
    return OnStandIns(device=torch.device("cpu"), small=True)


@pytest.mark.slow
def test_bandwidths_are_those_of_a_copy_s(stand_ins, monkeypatch):
    monkeypatch.setattr(tree_sum, "_kernel", lambda: tree_sum._loop)
    result = sums.run(stand_ins)
    assert result.verdict == "ok", result.reason
    (rows,) = result.tables.values()
    for row in rows:
        assert row["bits of the kernel"] == row["bits of the loop"] == "the tree's"
        assert row["kernel / copy"] > 0
        assert row["loop, host us"] > 0
    assert "GB/s: 2: " in result.reason


def test_a_kernel_that_is_far_from_a_copy_s_bandwidth_fails(stand_ins, monkeypatch):
    monkeypatch.setattr(tree_sum, "_kernel", lambda: tree_sum._loop)
    monkeypatch.setattr(sums, "copy_bandwidth", lambda place: 1e6)
    monkeypatch.setattr(sums, "LAYER", 100_000)
    large = OnStandIns(device=torch.device("cpu"))
    assert "8 rows: the kernel reaches 0% of a copy's bandwidth" in sums.run(large).reason
    monkeypatch.setattr(tree_sum, "_kernel", lambda: None)
    assert "there is no Triton" in sums.run(stand_ins).reason


def test_waits_that_torch_reports_are_counted(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    places = []
    with host_waits._cuda_waits(places):
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
        warnings.warn("another one", UserWarning, stacklevel=1)
    assert modes == ["warn", "default"]
    assert len(places) == 1
    assert "tests/test_gpu_check.py:" in places[0]


def test_the_gap_before_the_update_is_that_of_the_profile(stand_ins, monkeypatch):
    def kernel(name, start, end):
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))

    update = "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor>"
    kernels = [kernel("nccl", 0, 90), kernel("gemm", 10, 40), kernel(update, 100, 200), kernel(update, 300, 400)]
    assert host_waits.gap_before_update(kernels) == 10
    assert host_waits.gap_before_update([*kernels, kernel("memcpy", 50, 120)]) == 0
    assert host_waits.gap_before_update(kernels[:2]) is None
    monkeypatch.setattr(host_waits, "zeroamp_training", lambda place, **_: zeroamp_training(place, 3))
    assert "no kernel of the update" in host_waits.idle_before_update(stand_ins, stage=3)


@pytest.mark.slow
def test_mfu_of_a_step(stand_ins):
    result = step_times.run(stand_ins)
    alone = next(iter(result.tables.values()))
    assert all(row["MFU"].endswith("%") for row in alone)
    assert ", MFU " in result.reason


@pytest.mark.slow
def test_what_is_reserved_stands_beside_the_plan(stand_ins, monkeypatch):
    monkeypatch.setattr(step_memory, "PeakOnCpu", step_memory.PeakOnGpu)
    monkeypatch.setattr(memory, "SMALL_STAGES", (3,))  # of which the stand-in's peak is about the planned one
    result = memory.run(stand_ins)
    assert result.verdict == "ok", result.reason
    assert "14.0 MiB allocated of 14.2 planned" in result.reason
    assert "30.0 MiB reserved" in result.reason


def test_the_environment_names_the_device(stand_ins):
    found = runner.environment(stand_ins)
    assert found["device"] == "NVIDIA H100, 79.2 GiB, 132 SMs"
    assert found["nccl"] == "2.28.9"


def test_every_variant_of_a_gpu_is_started(stand_ins, monkeypatch):
    started = {}

    def start(variant, environment, place):
        started[variant] = environment
        if variant in disturbance.SANITIZERS:
            return {"reports": 0, "first": ""}
        return {"bits": {"stage 3": "abc"}} if variant != "no caching of memory" else {"error": "out of memory"}

    monkeypatch.setattr(disturbance, "_start", start)
    result = disturbance.run(stand_ins)
    assert result.reason == "no caching of memory: out of memory"
    assert started["launches that block"] == {"CUDA_LAUNCH_BLOCKING": "1"}
    assert set(started) == {*disturbance.EVERYWHERE, *disturbance.ON_CUDA, *disturbance.SANITIZERS}

"""The order in which ranks are summed: the loop and the kernel against the tree written out, bit for bit."""

import importlib.util
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch

from zeroamp.hooks.collectives import tree_sum as module
from zeroamp.hooks.collectives.tree_sum import tree_sum

ROOT = Path(__file__).parents[3]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUMS = (1, 2, 3, 5, 6, 8, 17, 64)


def written_out(rows):
    if len(rows) == 1:
        return rows[0].float()
    left = max(2**power for power in range(20) if 2**power < len(rows))
    return written_out(rows[:left]) + written_out(rows[left:])


def some_rows(num_rows, numel, dtype):
    """Rows whose sum depends on its order: of very different sizes."""
    generator = torch.Generator().manual_seed(num_rows * 7919 + numel)
    sizes = 2.0 ** torch.randint(-6, 6, (num_rows, numel), generator=generator)
    return (torch.randn(num_rows, numel, generator=generator) * sizes).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [*range(1, 18), 31, 64, 100])
def test_the_loop_adds_in_the_order_of_the_tree(num_rows, dtype):
    rows, total = some_rows(num_rows, 1003, dtype), torch.empty(1003)
    for divide_by in (1, num_rows, 2.7):
        tree_sum(rows, total, divide_by)
        assert torch.equal(total, written_out(rows) / divide_by)


def test_the_order_matters_to_these_rows():
    rows = some_rows(8, 1003, torch.float32)
    assert not torch.equal(written_out(rows), sum(rows[1:], rows[0]))


@pytest.mark.parametrize("block", [1, 100, 1003])
def test_blocks_change_nothing(block):
    rows, total = some_rows(7, 1003, torch.bfloat16), torch.empty(1003)
    module._loop(rows, total, 7, block)
    assert torch.equal(total, written_out(rows) / 7)


def test_a_tree_of_blocks_of_a_power_of_two_is_the_same_tree():
    rows = some_rows(12, 500, torch.float32)
    blocks = torch.stack([written_out(rows[first : first + 4]) for first in range(0, 12, 4)])
    assert torch.equal(written_out(blocks), written_out(rows))


def kernel_equals_the_tree(device):
    """Run the kernel; return how often it was launched for each number of rows of 4,096 elements."""
    from zeroamp.hooks.collectives import tree_kernel

    launches = {}
    cases = [(num_rows, numel) for num_rows in (*NUMS, 65, 130) for numel in (1003, 4096)]
    # On a GPU each kind of size is compiled, which takes up to two seconds.
    cases += [(8, 1)] if device == "cuda" else [(num_rows, n) for num_rows in (2, 3, 8) for n in range(1, 41)]
    for num_rows, numel in cases:
        for dtype in DTYPES[:: 2 if device == "cuda" else 1]:
            rows, total = some_rows(num_rows, numel, dtype).to(device), torch.empty(numel, device=device)
            for divide_by in (1, 3):
                num_launches = tree_kernel.tree_sum(rows, total, divide_by)
                assert torch.equal(total.cpu(), written_out(rows.cpu()) / divide_by), (num_rows, dtype, numel)
                padded = torch.full((num_rows, -(-numel // 8) * 8), math.nan, dtype=dtype, device=device)
                padded[:, :numel] = rows
                tree_kernel.tree_sum(padded[:, :numel], total, divide_by)
                assert torch.equal(total.cpu(), written_out(rows.cpu()) / divide_by), (num_rows, dtype, numel)
                if numel == 4096:
                    launches[num_rows] = num_launches
    return launches


LAUNCHES = dict.fromkeys(NUMS, 1) | {64: 2, 65: 3, 130: 3}


NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, 290 MB, which is no requirement of a CPU's tests"
)


def _run(call, **environment):
    code = f"from tests.hooks.collectives.test_tree_sum import *; {call}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment},
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@NEEDS_TRITON
def test_the_kernel_has_the_bits_of_the_tree_in_the_interpreter():
    found = _run("print(kernel_equals_the_tree('cpu'))", TRITON_INTERPRET="1")
    assert found == str(LAUNCHES)


def compiled(arch, num_rows, numel, row_stride, dtype):
    """Return {bytes of a load: how many a thread has}, the bytes of its stack, and its IEEE divisions. Needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from zeroamp.hooks.collectives import tree_kernel

    of_a_load = 16 // dtype.itemsize
    constants = {"num_rows": num_rows, "divides": True, "width": 128 * of_a_load}
    constants |= {"row_alignment": math.gcd(row_stride, of_a_load), "output_alignment": math.gcd(numel, 4)}
    integers = {"row_stride": row_stride, "output_stride": numel, "numel": numel}
    constants |= {name: 1 for name, value in integers.items() if value == 1}  # as Triton does
    types = {"rows": "*bf16" if dtype == torch.bfloat16 else "*fp32", "output": "*fp32"}
    types |= dict.fromkeys(integers, "i32") | {"divide_by": "fp32"}
    aligned = [0, 1] + [place for place, value in enumerate(integers.values(), 2) if value % 16 == 0]
    source = ASTSource(
        fn=tree_kernel._sum_rows,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in aligned},
    )
    made = compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4})
    loads = Counter(
        int(number or 1) * int(bits) // 8
        for number, bits in re.findall(r"ld\.global(?:\.v(\d))?\.b(\d+)", made.asm["ptx"])
    )
    tools = Path(importlib.util.find_spec("triton").origin).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        usage = subprocess.run(
            [tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    return dict(loads), int(re.search(r"STACK:(\d+)", usage)[1]), made.asm["ptx"].count("div.rn.f32")


def check_compiled():
    """For LARGEST rows of a multiple of 16 bytes, with or without padding: 16-byte loads, no stack, IEEE divisions."""
    from zeroamp.hooks.collectives import tree_kernel

    for arch in (80, 90, 100):
        for dtype, columns in ((torch.bfloat16, 8), (torch.float32, 4)):
            for numel in (1600, 1608, 1604, 1602, 1601, 1):
                row_stride = -(-numel // columns) * columns
                loads, stack, divisions = compiled(arch, tree_kernel.LARGEST, numel, row_stride, dtype)
                assert (loads, stack, divisions) == ({16: tree_kernel.LARGEST}, 0, columns), (arch, dtype, numel)


@pytest.mark.slow
@NEEDS_TRITON
def test_the_kernel_compiles_to_16_byte_loads_and_ieee_divisions_without_a_stack():
    _run("check_compiled()")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_has_the_bits_of_the_tree_on_cuda():
    launches = kernel_equals_the_tree("cuda")
    assert launches == LAUNCHES
    rows = some_rows(8, 4096, torch.bfloat16).cuda()
    total, looped = torch.empty(4096, device="cuda"), torch.empty(4096, device="cuda")
    assert tree_sum(rows, total, 3) == 1  # what a reduction calls takes the kernel
    assert module._loop(rows, looped, 3) == 12  # a copy and an add per pair, three adds, the division
    assert torch.equal(total, looped)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("Failed to find C compiler"), subprocess.CalledProcessError(1, "gcc"), AssertionError("libcuda")],
)
def test_a_kernel_that_triton_cannot_compile_is_replaced_by_the_loop(monkeypatch, error):
    def kernel(*_args):
        raise error

    monkeypatch.setattr(module, "_has_kernel", lambda _device: module._failure is None)
    monkeypatch.setattr(module, "_kernel", lambda: kernel)
    monkeypatch.setattr(module, "_failure", None)
    assert module.compile_sum(2, torch.bfloat16, torch.device("cpu")) is error
    assert module.compile_sum(4, torch.float32, torch.device("cpu")) is error  # is not tried again
    rows, output = torch.randn(3, 40).bfloat16(), torch.empty(40)
    tree_sum(rows, output, 3)
    wanted = ((rows[0].float() + rows[1].float()) + rows[2].float()) / 3
    assert torch.equal(output, wanted)


def test_other_devices_than_cpus_sum_one_block_of_usual_units():
    rows, output = torch.empty(8, 2**22, dtype=torch.bfloat16, device="meta"), torch.empty(2**22, device="meta")
    launches = module._loop(rows, output, 8)
    assert launches == 12

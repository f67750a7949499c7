"""The order in which ranks are summed: the loop and the kernel against the tree written out, bit for bit."""

import importlib.util
import math
import subprocess

import pytest
import torch

from tests.measuring.logs import log_lines
from tests.oracles.one_process import tree
from tests.processes.launch import completed
from zeroamp.hooks.collectives import tree_sum as module
from zeroamp.hooks.collectives.tree_sum import tree_sum

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUMS = (1, 2, 3, 5, 6, 8, 17, 64)


def some_rows(num_rows, numel, dtype):
    """Rows whose sum depends on its order: of very different sizes."""
    generator = torch.Generator().manual_seed(num_rows * 7919 + numel)
    sizes = 2.0 ** torch.randint(-6, 6, (num_rows, numel), generator=generator)
    return (torch.randn(num_rows, numel, generator=generator) * sizes).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loop_adds_in_the_order_of_the_tree(dtype):
    for num_rows in (*range(1, 18), 31, 64, 100):
        rows, total = some_rows(num_rows, 1003, dtype), torch.empty(1003)
        for divide_by in (1, num_rows, 2.7):
            tree_sum(rows, total, divide_by)
            assert torch.equal(total, tree(rows) / divide_by), num_rows
    for block in (1, 100, 1003):
        rows, total = some_rows(7, 1003, dtype), torch.empty(1003)
        module._loop(rows, total, 7, block)
        assert torch.equal(total, tree(rows) / 7), block


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
                assert torch.equal(total.cpu(), tree(rows.cpu()) / divide_by), (num_rows, dtype, numel)
                padded = torch.full((num_rows, -(-numel // 8) * 8), math.nan, dtype=dtype, device=device)
                padded[:, :numel] = rows
                tree_kernel.tree_sum(padded[:, :numel], total, divide_by)
                assert torch.equal(total.cpu(), tree(rows.cpu()) / divide_by), (num_rows, dtype, numel)
                if numel == 4096:
                    launches[num_rows] = num_launches
    return launches


LAUNCHES = dict.fromkeys(NUMS, 1) | {64: 2, 65: 3, 130: 3}


NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, 290 MB, which is no requirement of a CPU's tests"
)


@pytest.mark.slow
@NEEDS_TRITON
def test_the_kernel_has_the_bits_of_the_tree_in_the_interpreter():
    code = "from tests.hooks.collectives.test_tree_sum import *; print(kernel_equals_the_tree('cpu'))"
    done = completed("-c", code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(LAUNCHES)


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
    with log_lines() as lines:
        for num_rows, dtype in ((2, torch.bfloat16), (4, torch.float32)):  # the second is not tried
            module.compile_sum(module.variant(num_rows, dtype, 16, 16), torch.device("cpu"))
    assert module._failure is error
    assert len(lines) == 1
    assert "same bits" in lines[0]
    rows, output = torch.randn(3, 40).bfloat16(), torch.empty(40)
    tree_sum(rows, output, 3)
    assert torch.equal(output, tree(rows) / 3)

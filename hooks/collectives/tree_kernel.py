"""A Triton kernel of `tree_sum.py`'s sum: all rows of a block of columns are added in registers, in tree order.

A program adds one block of columns. It reads every row once, adds in fp32 in exactly the order of the tree, and writes
once: for N rows of bf16, 2 N + 4 bytes per column and one launch. The tree is unrolled when the kernel is compiled,
once per number of rows. With more than `LARGEST` rows, whole subtrees of `LARGEST` rows are summed first, in one
launch, and then their sums. LARGEST is a power of two, so the tree is the same.

Loads have 16 bytes if the length of the rows is a multiple of that. Triton itself only knows whether 16 divides the
length in elements, so the kernel gets the largest power of two up to 16 that does. Shorter loads need more registers,
so fewer such rows are summed in one launch: with `LARGEST` of them, registers would be spilled.

Rows are added one by one and not with `tl.sum`, whose order is its own. `tl.div_rn` is the IEEE division; `/` is an
approximation on CUDA. With TRITON_INTERPRET=1 the kernel runs on a CPU, where tests compare its bits with the loop's.
Arguments of kernels have no type annotations: Triton would interpret them.
"""

import math

import torch
import triton
import triton.language as tl

LARGEST = 32
"""Rows of a tree in one launch, if loads have 16 bytes."""
LARGEST_UNALIGNED = 16
"""Rows of a tree in one launch, if loads are shorter."""
_BYTES_OF_A_LOAD = 16
_WARPS = 4
_THREADS = 32 * _WARPS


@triton.jit  # type: ignore[untyped-decorator]
def _subtree(rows, first: tl.constexpr, num_rows: tl.constexpr, row_stride, columns, is_inside):  # type: ignore[no-untyped-def]
    """Return the sum of `num_rows` rows from `first` on, in fp32, in the order of the tree."""
    if num_rows == 1:
        total = tl.load(rows + first * row_stride + columns, mask=is_inside, other=0.0).to(tl.float32)
    else:
        # The largest power of two below num_rows: the highest bit of num_rows - 1.
        left: tl.constexpr = (
            32
            if num_rows > 32
            else (16 if num_rows > 16 else (8 if num_rows > 8 else (4 if num_rows > 4 else (2 if num_rows > 2 else 1))))
        )
        total = _subtree(rows, first, left, row_stride, columns, is_inside) + _subtree(
            rows, first + left, num_rows - left, row_stride, columns, is_inside
        )
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _sum_rows(  # type: ignore[no-untyped-def]
    rows,
    output,
    numel,
    divide_by,
    num_rows: tl.constexpr,
    divides: tl.constexpr,
    width: tl.constexpr,
    alignment: tl.constexpr,
):
    """Write the sum of rows p * num_rows to (p + 1) * num_rows - 1 to row p of `output`, for p = program_id(1)."""
    # Not `.to`: a numel of 1 is compiled as a constant, which has no methods.
    stride = tl.multiple_of(tl.cast(numel, tl.int64), alignment)
    subtree = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0).to(tl.int64) * width + tl.arange(0, width)
    is_inside = columns < stride  # not numel: so Triton knows that all columns of a load are inside, or none
    total = _subtree(rows + subtree * num_rows * stride, 0, num_rows, stride, columns, is_inside)
    if divides:
        total = tl.div_rn(total, divide_by)
    tl.store(output + subtree * stride + columns, total, mask=is_inside)


def _launch(rows: torch.Tensor, output: torch.Tensor, num_rows: int, num_subtrees: int, divide_by: float) -> int:
    numel = rows.shape[1]
    width = _THREADS * (_BYTES_OF_A_LOAD // rows.element_size())
    grid = (triton.cdiv(numel, width), num_subtrees)
    _sum_rows[grid](
        rows,
        output,
        numel,
        float(divide_by),
        num_rows=num_rows,
        divides=divide_by != 1,
        width=width,
        alignment=math.gcd(numel, _BYTES_OF_A_LOAD),
        num_warps=_WARPS,
    )
    return 1


def tree_sum(rows: torch.Tensor, output: torch.Tensor, divide_by: float = 1) -> int:
    """Add rows as `zeroamp.hooks.collectives.tree_sum.tree_sum` does, on CUDA. Return the number of launches."""
    num_rows, numel = rows.shape
    if numel == 0:
        return 0
    launches = 0
    while num_rows > (largest := LARGEST if numel * rows.element_size() % _BYTES_OF_A_LOAD == 0 else LARGEST_UNALIGNED):
        num_whole, rest = divmod(num_rows, largest)
        sums = torch.empty((num_whole + (rest > 0), numel), dtype=torch.float32, device=rows.device)
        launches += _launch(rows, sums, largest, num_whole, 1)
        if rest:
            launches += _launch(rows[num_whole * largest :], sums[num_whole:], rest, 1, 1)
        rows, num_rows = sums, len(sums)
    return launches + _launch(rows, output, num_rows, 1, divide_by)

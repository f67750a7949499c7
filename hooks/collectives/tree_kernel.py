"""A Triton kernel of `tree_sum.py`'s sum: all rows of a block of columns are added in registers, in tree order.

A program adds one block of columns. It reads every row once, in 16-byte loads where the rows are aligned, adds in fp32
in exactly the order of the tree, and writes once: for N rows of bf16, 2 N + 4 bytes per column and one launch. The tree
is unrolled when the kernel is compiled, once per number of rows. With more than `LARGEST` rows, whole subtrees of
`LARGEST` rows are summed first, in one launch, and then their sums. LARGEST is a power of two, so the tree is the same.

Rows are added one by one and not with `tl.sum`, whose order is its own. `tl.div_rn` is the IEEE division; `/` is an
approximation on CUDA. With TRITON_INTERPRET=1 the kernel runs on a CPU, where tests compare its bits with the loop's.
Arguments of kernels have no type annotations: Triton would interpret them.
"""

import torch
import triton
import triton.language as tl

LARGEST = 64
"""Rows of a tree in one launch."""
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
    rows, output, numel, divide_by, num_rows: tl.constexpr, divides: tl.constexpr, width: tl.constexpr
):
    """Write the sum of rows p * num_rows to (p + 1) * num_rows - 1 to row p of `output`, for p = program_id(1)."""
    stride = tl.cast(numel, tl.int64)  # not `.to`: a numel of 1 is compiled as a constant, which has no methods
    subtree = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0).to(tl.int64) * width + tl.arange(0, width)
    is_inside = columns < numel
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
        num_warps=_WARPS,
    )
    return 1


def tree_sum(rows: torch.Tensor, output: torch.Tensor, divide_by: float = 1) -> int:
    """Add rows as `zeroamp.hooks.collectives.tree_sum.tree_sum` does, on CUDA. Return the number of launches."""
    num_rows, numel = rows.shape
    if numel == 0:
        return 0
    launches = 0
    while num_rows > LARGEST:
        num_whole, rest = divmod(num_rows, LARGEST)
        sums = torch.empty((num_whole + (rest > 0), numel), dtype=torch.float32, device=rows.device)
        launches += _launch(rows, sums, LARGEST, num_whole, 1)
        if rest:
            launches += _launch(rows[num_whole * LARGEST :], sums[num_whole:], rest, 1, 1)
        rows, num_rows = sums, len(sums)
    return launches + _launch(rows, output, num_rows, 1, divide_by)

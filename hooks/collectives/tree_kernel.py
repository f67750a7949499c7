"""A Triton kernel of `tree_sum.py`'s sum: all rows of a block of columns are added in registers, in tree order.

A program adds one block of columns. It reads every row once, adds in fp32 in exactly the order of the tree, and writes
once: for N rows of bf16, 2 N + 4 bytes per column and one launch. The tree is unrolled when the kernel is compiled,
once per number of rows. With more than `LARGEST` rows, whole subtrees of `LARGEST` rows are summed first, in one
launch, and then their sums. LARGEST is a power of two, so the tree is the same. `tree_sum.Variant` has all values for
which the kernel is compiled.

Loads have 16 bytes if the distance of the rows is a multiple of that: `gradient_reduction.py` makes it one. Triton
itself only knows whether 16 divides a number of elements, so the kernel gets the largest power of two that divides the
distance, up to the elements of a load. A load may then read padding behind a row, which is never stored.

Rows are added one by one and not with `tl.sum`, whose order is its own. `tl.div_rn` is the IEEE division; `/` is an
approximation on CUDA. Every sum is divided: a division by 1 changes no bit, and a kernel without one would be another
variant. With TRITON_INTERPRET=1 the kernel runs on a CPU, where tests compare its bits with the loop's. Arguments of
kernels have no type annotations: Triton would interpret them.
"""

import torch
import triton
import triton.language as tl

from zeroamp.hooks.collectives.tree_sum import variant

LARGEST = 32
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


# Alignments are arguments. Triton would compile the kernel again for a number of 1, and for multiples of 16.
@triton.jit(do_not_specialize=["row_stride", "output_stride", "numel"])  # type: ignore[untyped-decorator]
def _sum_rows(  # type: ignore[no-untyped-def]
    rows,
    output,
    row_stride,
    output_stride,
    numel,
    divide_by,
    num_rows: tl.constexpr,
    width: tl.constexpr,
    row_alignment: tl.constexpr,
    output_alignment: tl.constexpr,
):
    """Write the sum of rows p * num_rows to (p + 1) * num_rows - 1 to row p of `output`, for p = program_id(1)."""
    row_stride = tl.multiple_of(tl.cast(row_stride, tl.int64), row_alignment)
    output_stride = tl.multiple_of(tl.cast(output_stride, tl.int64), output_alignment)
    numel = tl.multiple_of(tl.cast(numel, tl.int64), output_alignment)
    subtree = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0).to(tl.int64) * width + tl.arange(0, width)
    # Not numel: so Triton knows that all columns of a load are inside, or none.
    total = _subtree(rows + subtree * num_rows * row_stride, 0, num_rows, row_stride, columns, columns < row_stride)
    tl.store(output + subtree * output_stride + columns, tl.div_rn(total, divide_by), mask=columns < numel)


def _launch(rows: torch.Tensor, output: torch.Tensor, num_rows: int, divide_by: float) -> int:
    """Write the sum of each `num_rows` rows to a row of `output`. Its rows are contiguous, or padded to `_THREADS`."""
    num_subtrees, numel = output.shape
    width = _THREADS * (_BYTES_OF_A_LOAD // rows.element_size())
    compiled = variant(num_rows, rows.dtype, rows.stride(0), numel)
    _sum_rows[triton.cdiv(numel, width), num_subtrees](
        rows,
        output,
        rows.stride(0),
        output.stride(0),
        numel,
        float(divide_by),
        num_rows=num_rows,
        width=width,
        row_alignment=compiled.row_alignment,
        output_alignment=compiled.output_alignment,
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
        padded = -(-numel // _THREADS) * _THREADS
        sums = torch.empty((num_whole + (rest > 0), padded), dtype=torch.float32, device=rows.device)[:, :numel]
        launches += _launch(rows, sums[:num_whole], LARGEST, 1)
        if rest:
            launches += _launch(rows[num_whole * LARGEST :], sums[num_whole:], rest, 1)
        rows, num_rows = sums, len(sums)
    return launches + _launch(rows, output[None], num_rows, divide_by)

"""Adds gradients of several ranks, always in the same order.

[Note: One order of summation]
The sum over N ranks is a balanced binary tree over the rank's index, in fp32. The left part has as many ranks as the
largest power of two below N, the right part has the others.

    T(1) = row 0        T(N) = T(first L rows) + T(other N - L rows),  L = the largest power of two < N

Every sum over ranks has this order: in one level or two, over shards or replicas, on every device. If blocks of equal
size, a power of two, are summed first, the tree over these sums is the same tree. So a sum over the ranks of each node
and then over the nodes has the bits of the sum in one level. HSDP with a power of two of shards has the bits of all its
ranks in one axis. With 2 or 3 ranks it is the order of the ranks. The rounding error grows with log2(N). That of a sum
in the order of the ranks would grow with N.

The sum is divided by the number of ranks once, after the whole tree. This is a division (IEEE), not a multiplication by
the inverse, which differs in the last bit unless N is a power of two.

[Note: The loop]
Without the kernel of `tree_kernel.py`, rows are added pair by pair, one block of columns at a time, as a binary counter
carries: two sums of equally many rows are added as soon as both are there. The sums left at the end are added from the
right. This is the tree above. It needs log2(N) - 1 blocks in fp32, and never a copy of the input in fp32. On a CPU it
takes 0.9 to 1.4 times as long as adding row after row (`benchmarks/records/`, paired runs).

[Note: Variants of the kernel]
Triton compiles a kernel for each `Variant`. `wrap_model` compiles those that the model's reductions can need, because
compiling takes up to two seconds, and may fail. Any other variant is compiled at its first sum. If any variant fails,
all sums of this process run the loop from then on. Other ranks may go on with the kernel.
"""

import logging
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from zeroamp.policies.errors import error_text

logger = logging.getLogger("zeroamp.rank")  # each rank prints its own

BLOCK = 2**18
"""Columns of a block on a CPU: 1 MiB in fp32. Smaller ones cost time: each op has a fixed cost."""
LARGE_BLOCK = 2**25
"""Columns of a block on other devices: 128 MiB in fp32. Each op is a launch, and there is no cache to fit."""


def tree_sum(rows: torch.Tensor, output: torch.Tensor, divide_by: float = 1) -> int:
    """Add the rows of `rows` in the order of the tree, divide by `divide_by`, and write the result to `output`.

    Args:
        rows: (N, M), bf16, fp16 or fp32; each row contiguous, and the same distance between all. Left unchanged.
        output: (M,), contiguous, fp32. Must not share memory with `rows`.
        divide_by: divides the sum, in fp32. 1 leaves it as it is.

    Returns:
        The number of kernels that were launched; 0 on a CPU.
    """
    if _has_kernel(rows.device) and (kernel := _kernel()) is not None:
        try:
            launches: int = kernel(rows, output, divide_by)
        except torch.OutOfMemoryError:  # not a fault of the kernel: the loop needs memory too
            raise
        except Exception as error:  # of Triton, of a compiler that it calls, or of the file system
            _give_up(error)
        else:
            return launches
    return _loop(rows, output, divide_by)


class Variant(NamedTuple):
    """The values for which the kernel is compiled: see [Note: Variants of the kernel]. `variant` makes one."""

    num_rows: int
    dtype: torch.dtype
    row_alignment: int
    """The largest power of two that divides the distance of rows in elements, up to the elements of 16 bytes."""
    output_alignment: int
    """4 if 4 divides the number of columns, so that the fp32 sums are stored 16 bytes at a time; else 1."""


def variant(num_rows: int, dtype: torch.dtype, row_stride: int, numel: int) -> Variant:
    """Return the variant for rows of `numel` elements, each `row_stride` elements behind the one before."""
    return Variant(num_rows, dtype, math.gcd(row_stride, max(1, 16 // dtype.itemsize)), 1 if numel % 4 else 4)


def compile_sum(variant: Variant, device: torch.device) -> None:
    """Compile and run the kernel, before a backward needs it. No effect on other devices than CUDA.

    Triton needs a C compiler, Python's headers and a writable cache. If it fails, all sums of this process run the
    loop, which has the same bits.
    """
    if has_kernel(device):
        numel = 12 + variant.output_alignment
        rows = torch.zeros((variant.num_rows, 16 + variant.row_alignment), dtype=variant.dtype, device=device)
        tree_sum(rows[:, :numel], torch.empty(numel, dtype=torch.float32, device=device), variant.num_rows)


def has_kernel(device: torch.device) -> bool:
    """Return whether sums on a device run the kernel, which must be compiled for them."""
    return _has_kernel(device) and _kernel() is not None


_failure: Exception | None = None
"""The error with which Triton failed. The kernel is not used any more then."""


def _give_up(error: Exception) -> None:
    """Use the loop from now on, and log why, once per process."""
    global _failure
    _failure = error
    logger.warning(
        "Triton cannot compile the kernel that sums gradients over ranks (%s). A loop sums them, with the same bits "
        "and more launches. Triton needs a C compiler (CC), Python's headers and a writable TRITON_CACHE_DIR.",
        error_text(error),
    )


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and _failure is None


@cache
def _kernel() -> Any:
    """Return `tree_kernel.tree_sum`, or None without Triton."""
    try:
        from zeroamp.hooks.collectives.tree_kernel import tree_sum
    except ImportError:
        return None
    return tree_sum


def _loop(rows: torch.Tensor, output: torch.Tensor, divide_by: float, block: int = 0) -> int:
    # See [Note: The loop].
    num_rows, numel = rows.shape
    on_cpu = rows.device.type == "cpu"
    block = block or (BLOCK if on_cpu else LARGE_BLOCK)
    # CUDA multiplies by the inverse of a divisor on the host. It divides by a divisor on the device.
    divisor = divide_by if on_cpu else torch.full((), divide_by, dtype=torch.float32, device=rows.device)
    num_temporaries = max(0, (num_rows - 1).bit_length() - 1)
    if num_temporaries == 0 and numel <= block:  # two rows of a small unit: slicing would take longer than adding
        launches = _add(rows.unbind(), [output])
        if divide_by != 1:
            output.div_(divisor)
            launches += 1
        return 0 if on_cpu else launches
    temporaries = torch.empty((num_temporaries, min(block, numel)), dtype=torch.float32, device=rows.device)
    launches = 0
    for begin in range(0, numel, block):
        total = output[begin : begin + block]
        places = [total, *(temporary[: total.numel()] for temporary in temporaries)]
        launches += _add(rows[:, begin : begin + block].unbind(), places)
        if divide_by != 1:
            total.div_(divisor)
            launches += 1
    return 0 if on_cpu else launches


def _add(rows: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> int:
    """Add the rows into the first place; the others are workspace. Return the number of ops."""
    sums: list[int] = []  # the numbers of rows in the sums at places 0, 1, …: falling powers of two
    num_ops = 0
    for first in range(0, len(rows) - 1, 2):
        place = places[len(sums)]
        if rows[first].dtype == torch.float32:
            torch.add(rows[first], rows[first + 1], out=place)
        else:
            place.copy_(rows[first])
            place.add_(rows[first + 1])  # promotes to fp32
            num_ops += 1
        sums.append(2)
        while len(sums) > 1 and sums[-1] == sums[-2]:
            places[len(sums) - 2].add_(places[len(sums) - 1])
            sums[-2:] = [2 * sums[-1]]
            num_ops += 1
        num_ops += 1
    if len(rows) % 2:
        num_ops += 1
        if sums:
            places[len(sums) - 1].add_(rows[-1])  # the right part of the smallest tree
        else:
            places[0].copy_(rows[-1])
    for last in range(len(sums) - 1, 0, -1):
        places[last - 1].add_(places[last])
        num_ops += 1
    return num_ops

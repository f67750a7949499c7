"""The gradient reduction of one parameter group: it communicates in one dtype, and sums in the same or another one.

With sums in fp32, the reduction is an all-to-all and a sum in the order of the tree (`tree_sum.py`). With native sums
it is the backend's reduce-scatter.

[Note: Summing in fp32]
Under autocast the raw gradient of a safe parameter is already in the low precision, so communicating it in that dtype
loses nothing. A native low-precision reduce-scatter loses bits in its partial sums. Here each rank sends every other
rank its chunk unchanged (an all-to-all, the same bytes as a ring's reduce-scatter), and sums what it received in fp32,
in the order of the tree. That is the fp32 reduction of the same gradients at half the bytes. fp32 gradients are summed
the same way, with the bytes of a ring's reduce-scatter.

[Note: All-reduce in tree order]
An all-reduce is the same exchange and sum of chunks, and then an all-gather of the sums. It moves the bytes of a ring's
all-reduce. The order of a backend's own all-reduce is not defined.

[Note: Dividing fp16]
A native sum of fp16 can overflow before it is divided, and dividing first can underflow. As FSDP2 does for its own fp16
reductions, divide by about sqrt(N) before and by the rest after: equal gradients on N ranks may then be as large as
65504 / sqrt(N) and as small as sqrt(N) x 2^-24. A sum in fp32 needs neither. With float16 accumulation at stages 0
and 1 (`divides_outside`), FSDP2 always divides this way itself, by the ranks that shard, and calls with SUM.

[Note: Divide factor]
With `set_gradient_divide_factor(factor)` FSDP2 passes PREMUL_SUM, which only NCCL has. Here the sum is divided by the
factor instead, fp16 in two parts as above. If replicas are summed in the order of the tree (`sum_over_replicas`), the
sum over shards is not divided. The sum over replicas is divided once, by the number of all ranks or by the factor. With
`zeroamp.reduce` "sum" the factor is 1: fp16 overflows as soon as the sum exceeds its range, and the loss scale then
falls.

[Note: Receive buffers]
On a CPU a receive buffer is released at the end of each backward. Allocating it again at the next backward's first
reduction does not raise the peak, because some activations have been released by then.

On an accelerator a receive buffer is retained. The accelerator's allocator has a pool of memory per stream, and the
buffer is allocated, written and read in FSDP2's stream for reductions. The forward runs in another stream. It could use
the memory of a released buffer only after the allocator has run out of memory, waited for the device and returned all
cached memory to the driver. The next backward would then allocate the buffer again, in each step. So `zeroamp plan`
counts the buffer during the whole step. `zeroamp.sleep` releases it.

The buffer of an embedding or head that is a unit of its own is large, and used once per backward. It is released after
its reduction, also on an accelerator. There it is allocated from the memory of the forward's stream, in which
`allocate` was called for the input, so that activations can use its memory. FSDP2 has made the stream for reductions
wait for that stream just before.

[Note: Aligned rows]
On an accelerator the chunks of an exchange begin at multiples of 16 bytes. NCCL sends other chunks byte by byte, and
the kernel of `tree_kernel.py` could not load 16 bytes at a time. If a shard's size is no such multiple, the input is
copied to padded rows in the receive buffer, and received in its own memory, which is allocated with room for the
padding. The padding is sent, is not counted as traffic, and is never part of a sum. The bits are the same.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from zeroamp.hooks._torch.dispatch import at_end_of_backward, backward_id
from zeroamp.hooks._torch.fsdp import all_gather, reduce_scatter
from zeroamp.hooks.collectives.collective_calls import issue
from zeroamp.hooks.collectives.traffic import CollectiveListener, IssuedCollective, ReduceOp
from zeroamp.hooks.collectives.tree_sum import Variant, tree_sum, variant
from zeroamp.hooks.observers.trace_labels import label
from zeroamp.hooks.tensors import allocating_in, hold_for_current_stream, stream_of

if TYPE_CHECKING:
    from zeroamp.two_level.nodes import Nodes

_SUM, _AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


@dataclass(slots=True)
class ReceiveBuffers:
    """Flat receive buffers of the all-to-alls, one per dtype and device, shared by all groups of a model.

    Sharing is safe because FSDP2 runs all reductions in one stream, one after the other: see [Note: Receive buffers].
    """

    _buffers: dict[tuple[torch.dtype, torch.device], torch.Tensor] = field(default_factory=dict)
    _backward: int = -1
    """The number of the backward that uses the buffers. If a backward raises, the next one releases its buffers."""

    def release(self) -> None:
        """Release the buffers on a CPU. Call after the reductions that used them."""
        for key in [key for key in self._buffers if not _is_kept(key[1])]:
            del self._buffers[key]

    def discard(self) -> None:
        """Release the buffers on all devices. The next backward allocates them again. Call between optimizer steps."""
        self._buffers.clear()

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a buffer of `tensor`'s size, dtype and device, which is valid until the next call."""
        key = tensor.dtype, tensor.device
        buffer = self._buffers.get(key)
        if not _is_kept(tensor.device) and backward_id() not in (-1, self._backward):
            self._backward = backward_id()
            at_end_of_backward(self.release)
        if buffer is None or buffer.numel() < tensor.numel():
            # The old buffer is released first, so that both never exist at once.
            buffer = None
            self._buffers.pop(key, None)
            self._buffers[key] = buffer = torch.empty_like(tensor)
        return buffer if buffer.numel() == tensor.numel() else buffer[: tensor.numel()]


def _is_kept(device: torch.device) -> bool:
    """Return whether the receive buffers on a device are retained between backwards: see [Note: Receive buffers]."""
    return device.type != "cpu"


@dataclass(slots=True, kw_only=True, eq=False)
class GroupReduceScatter:
    """A reduce-scatter for `FSDPModule.set_custom_reduce_scatter`. One per group.

    FSDP2 calls `allocate` for the unsharded input, copies and casts the gradients into it, calls `allocate` for the
    sharded output, and then calls the object. The input is allocated in the communication dtype, so there is no further
    copy in another dtype. Beside the gradients, a reduction needs memory for its input and its output. An all-to-all
    also needs a receive buffer of the input's size.
    """

    communication_dtype: torch.dtype
    """The dtype of the input, which is sent to the other ranks."""
    reduce_dtype: torch.dtype
    """The dtype of the output. After an all-to-all, the sum is computed in it. A backend's reduce-scatter sums in
    `communication_dtype`, and its output is cast to `reduce_dtype`."""
    dtypes_of_sums: tuple[torch.dtype, torch.dtype]
    """`communication_dtype` and `reduce_dtype` of a reduction of sums of several micro-batches."""
    reduces_sums: bool = False
    """Whether the current reduction is of such sums."""
    collective: Literal["reduce_scatter", "all_to_all"] | None
    """"all_to_all": see [Note: Summing in fp32]. None if there is one shard: FSDP2 then only copies the input."""
    op: ReduceOp = dist.ReduceOp.AVG
    """The op of the backend's reduce-scatter. If it is SUM and FSDP2 passes AVG, the division happens here: see
    [Note: Dividing fp16]."""
    divide_factor: Callable[[], float | None] = lambda: None
    """Returns the factor that `set_gradient_divide_factor` set: see [Note: Divide factor]."""
    world_size: int
    """The number of ranks of the mesh axis that shards."""
    replicas: dist.ProcessGroup | None = None
    """The group of the replicas that `sum_over_replicas` sums in the order of the tree. None: FSDP2 sums the replicas,
    or there are none."""
    nodes: "Nodes | None" = None
    """The two levels of the reduction over the ranks that shard. None: one level."""
    replica_nodes: "Nodes | None" = None
    """The two levels of the sum over `replicas`. None: one level."""
    divides_outside: bool = False
    """Whether FSDP2 itself divides: see [Note: Dividing fp16]."""
    group_name: str = ""
    listeners: Sequence[CollectiveListener] = ()
    buffers: ReceiveBuffers = field(default_factory=ReceiveBuffers)
    shares_buffers: bool = True
    """False for an embedding or head that is a unit of its own. Its receive buffer is released after the reduction. On
    a CPU the shared buffers are released before the reduction."""
    _pending_input: tuple[int, int] | None = None
    """(backward, elements) of an input whose output is not allocated yet. FSDP2 calls `allocate` in the same way for
    input and output, so `allocate` compares its call with this."""
    _row_length: int = 0
    """Elements from one rank's chunk of the input to the next: see [Note: Aligned rows]."""
    _stream: Any = None
    """The stream in which the input of an own unit was allocated; None on a CPU: see [Note: Receive buffers]."""
    _input: torch.Tensor | None = None
    """The input of a reduction with one shard (stage 0), until the replicas are summed."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an empty 1-D tensor: the input in the communication dtype, the output in the reduce dtype.

        `dtype` is FSDP2's `reduce_dtype`, in which unsharded gradients accumulate. It is not used here.
        """
        del dtype
        numel = math.prod(map(int, size))
        communication_dtype, reduce_dtype = self.communication_dtype, self.reduce_dtype
        if self.reduces_sums:
            communication_dtype, reduce_dtype = self.dtypes_of_sums
        backward = backward_id()
        is_output = self._pending_input == (backward, numel * self.world_size)
        self._pending_input = None  # cleared before an allocation can raise
        if is_output:
            return torch.empty(numel, dtype=reduce_dtype, device=device)
        if not self.shares_buffers:
            self.buffers.release()
            self._stream = stream_of(device)
        room = numel
        if self.collective == "all_to_all":
            self._row_length = row_length(numel // self.world_size, communication_dtype, device)
            room = self.world_size * self._row_length
        tensor = torch.empty(room, dtype=communication_dtype, device=device)
        if room != numel:
            tensor = tensor[:numel]
        self._pending_input = backward, numel
        self._input = tensor if self.world_size == 1 and self.replicas is not None else None
        return tensor

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce `input_tensor` (unsharded, communication dtype) into `output_tensor` (this rank's shard).

        `op` is AVG, SUM, or the PREMUL_SUM of a divide factor: see [Note: Divide factor].
        """
        if async_op:
            raise AssertionError("expected FSDP2 to reduce on its own stream, got async_op=True")
        divide_by: float = 1
        if op is _AVG or op == _AVG:  # FSDP2 passes the same object, and comparing ops by value takes microseconds
            divide_by = group.size()
        elif op != _SUM:
            factor = self.divide_factor()  # see [Note: Divide factor]
            if factor is None:
                raise AssertionError(f"expected SUM, AVG or a divide factor, got {op}")
            op, divide_by = _SUM, factor
        with label("reduce_scatter", self.group_name, input_tensor.dtype):
            if self.collective == "all_to_all":
                self._sum(output_tensor, input_tensor, group, 1 if self.replicas is not None else divide_by)
            else:
                self._reduce_scatter(output_tensor, input_tensor, group, op, divide_by)

    def sum_over_replicas(self, reduced: torch.Tensor) -> None:
        """Sum the reduced shard (fp32) over `replicas`, in place, and divide: see [Note: Divide factor]."""
        group, whole, self._input = self.replicas, self._input, None
        if group is None:
            raise AssertionError("expected replicas that are summed in the order of the tree, got none")
        factor = self.divide_factor()
        if whole is not None and factor is not None:
            reduced.copy_(whole)  # FSDP2 has divided `reduced`, its copy of the input
            # FSDP2 releases the input when its own stream is done with it. This stream may still read it.
            hold_for_current_stream(whole)
        if self.divides_outside:
            divide_by = 1.0 if factor is not None else group.size()
        else:
            divide_by = group.size() * self.world_size if factor is None else factor
        issued = IssuedCollective("all_reduce", reduced, self.group_name, group)
        with label("all_reduce", self.group_name, reduced.dtype):
            issue(
                lambda: all_reduce_in_tree_order(reduced, group, divide_by, self.replica_nodes), issued, self.listeners
            )

    def _sum(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, divide_by: float
    ) -> None:
        numel, num_ranks, length = output_tensor.numel(), self.world_size, self._row_length
        chunks = input_tensor
        if length != numel:
            chunks = input_tensor.as_strided((num_ranks * length,), (1,))  # with the room that `allocate` left
        received = self.buffers.like(chunks) if self.shares_buffers else self._own_buffer(chunks)
        if length != numel:  # see [Note: Aligned rows]
            received.view(num_ranks, length)[:, :numel].copy_(input_tensor.view(num_ranks, numel))
            chunks, received = received, chunks
        issued = IssuedCollective("all_to_all", input_tensor, self.group_name, group)
        issue(sum_over_ranks, issued, self.listeners, chunks, received, output_tensor, divide_by, group, self.nodes)

    def _own_buffer(self, chunks: torch.Tensor) -> torch.Tensor:
        """Return a receive buffer for one reduction: see [Note: Receive buffers]."""
        with allocating_in(self._stream, chunks.device):
            received = torch.empty_like(chunks)
        hold_for_current_stream(received)
        return received

    def _reduce_scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        divide_by: float,
    ) -> None:
        divides_here = self.op == dist.ReduceOp.SUM or op == dist.ReduceOp.SUM
        is_float16 = input_tensor.dtype == torch.float16  # see [Note: Dividing fp16]
        before = 2 ** math.ceil(math.log2(divide_by) / 2) if divides_here and is_float16 and divide_by > 1 else 1
        if before > 1:
            input_tensor.div_(before)
        reduced = output_tensor
        if output_tensor.dtype != input_tensor.dtype:
            reduced = torch.empty_like(output_tensor, dtype=input_tensor.dtype)
        op = dist.ReduceOp.SUM if divides_here else op
        issued = IssuedCollective("reduce_scatter", input_tensor, self.group_name, group, op)
        issue(reduce_scatter, issued, self.listeners, reduced, input_tensor, group, op)
        if reduced is not output_tensor:
            output_tensor.copy_(reduced)
        if divides_here and divide_by != 1:
            output_tensor.div_(divide_by / before)


def row_length(numel: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many elements a row of `numel` has in an exchange: see [Note: Aligned rows]. On a CPU `numel`."""
    multiple = 1 if device.type == "cpu" else max(1, 16 // dtype.itemsize)
    return -(-numel // multiple) * multiple


def sum_over_ranks(
    chunks: torch.Tensor,
    received: torch.Tensor,
    output: torch.Tensor,
    divide_by: float,
    group: dist.ProcessGroup,
    nodes: "Nodes | None" = None,
) -> None:
    """Send each rank its chunk, and sum the chunks of this rank: see [Note: Summing in fp32].

    Args:
        chunks: (N x M,), contiguous, one chunk for each of the N ranks of the group, in their order. May be
            overwritten.
        received: like `chunks`. Overwritten.
        output: (M,) or the first elements of this rank's sum, fp32: the others are padding.
        divide_by: divides the sum.
        group: the ranks.
        nodes: the two levels of the group. None: one level.
    """
    if nodes is not None:
        nodes.sum_over_ranks(chunks, received, output, divide_by)
        return
    dist.all_to_all_single(received, chunks, group=group)
    rows = received.view(group.size(), -1)
    tree_sum(rows if rows.shape[1] == output.numel() else rows[:, : output.numel()], output, divide_by)


def variants_over_ranks(
    num_ranks: int, dtype: torch.dtype, multiple: int = 16, nodes: "Nodes | None" = None
) -> Iterator[Variant]:
    """Yield the variants of the kernel that `sum_over_ranks` may need on CUDA.

    Args:
        num_ranks: the number of ranks of the group.
        dtype: of the chunks.
        multiple: the number of elements of each sum is a multiple of it. 16: as in an all-reduce.
        nodes: the two levels of the group. None: one level.
    """
    for numel in (16, multiple):
        if nodes is not None:
            yield from nodes.variants(dtype, numel)
        else:
            yield variant(num_ranks, dtype, 16, numel)  # rows are aligned: see [Note: Aligned rows]


def all_reduce_in_tree_order(
    tensor: torch.Tensor, group: dist.ProcessGroup, divide_by: float = 1, nodes: "Nodes | None" = None
) -> None:
    """Sum a tensor over the ranks of `group`, in place: see [Note: All-reduce in tree order].

    Allocates about as much memory as the tensor has, before it issues the first collective.

    Args:
        tensor: 1-D, contiguous. A low precision is sent as it is, and the fp32 sum is rounded to it. If the number of
            ranks does not divide its size, a padded copy is summed.
        group: the ranks, in the order of the tree.
        divide_by: divides the sum.
        nodes: the two levels of the group. None: one level.
    """
    num_ranks, numel = group.size(), tensor.numel()
    length = row_length(-(-numel // num_ranks), tensor.dtype, tensor.device)
    chunks = tensor
    if length * num_ranks != numel:
        chunks = tensor.new_zeros(length * num_ranks)
        chunks[:numel].copy_(tensor)
    received, total = torch.empty_like(chunks), tensor.new_empty(length, dtype=torch.float32)
    sum_over_ranks(chunks, received, total, divide_by, group, nodes)
    if nodes is not None:
        nodes.all_gather(chunks, total.to(chunks.dtype))
    else:
        all_gather(chunks, total.to(chunks.dtype), group, async_op=False)
    if chunks is not tensor:
        tensor.copy_(chunks[:numel])

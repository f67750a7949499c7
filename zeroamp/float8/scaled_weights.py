"""Weights that are all-gathered in float8, by torchao's tensors. Imported only where a config asks for it.

[Note: What is rounded]
Before each all-gather, a rank multiplies its fp32 shard of a weight by the weight's scale and rounds the product to
float8_e4m3fn, to nearest, ties to even. The unsharded parameter is torchao's `Float8TrainingTensor`: these values, and
the scale. A Linear divides them by the scale and computes in bf16. Its scale is a power of two, so the quotient is
exact in bf16: the weight is rounded once, from fp32 to float8. It has 4 significant bits: a relative error of at most
2^-4. Values that are less than about 2^-14 of the weight's largest magnitude have an absolute error of at most 2^-17 of
it. The gradient of the weight is that of the rounded weight, in bf16: the rounding is left out of the backward.

[Note: One scale per weight]
The scale is the largest at which the weight's largest magnitude, over all ranks, stays within float8. The largest
magnitudes of all weights are reduced over the ranks in one all-reduce, before the first forward of each optimizer step
and before each forward outside of a step, unless all weights are still unsharded. So nothing that changes a weight
between two forwards needs to be noticed: an optimizer, a checkpoint that is loaded, or an assignment by the caller.
Inside an optimizer step, the version counters of the shards show whether a weight was changed. They are also compared
before each all-gather: a caller may have evaluated other weights between a forward and its backward. All ranks make the
same changes, so they issue the same all-reduces. Where a module is unsharded outside of the model's forward and
backward, the scales are computed at that moment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torchao.float8 import Float8TrainingTensor, LinearMMConfig
from torchao.float8.float8_utils import amax_to_scale
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from zeroamp.float8.conflicts import SCALES
from zeroamp.hooks._torch.all_gather_extension import ShardOf, largest_magnitudes
from zeroamp.hooks._torch.dispatch import is_in_backward
from zeroamp.hooks.collectives.collective_calls import issue
from zeroamp.hooks.collectives.traffic import CollectiveListener, IssuedCollective

DTYPE = torch.float8_e4m3fn
_EXPONENT = 0x7F800000
"""The bits of the exponent of an fp32 number."""


@dataclass(slots=True, kw_only=True, eq=False)
class Float8Weight:
    """The all-gather of one weight, as FSDP2's `AllGatherExtension`."""

    shard: ShardOf
    scale: Callable[[], torch.Tensor]
    """Returns the scale of the weight: 0-D, fp32."""
    _sent: Any = None

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return this rank's shard in float8, and its scale."""
        self._sent = WeightWithDynamicFloat8CastTensor(self.shard.padded, LinearMMConfig(), DTYPE, self.scale())
        sent: tuple[tuple[torch.Tensor, ...], Any] = self._sent.fsdp_pre_all_gather(mesh)
        return sent

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        """Return the unsharded parameter, a `Float8TrainingTensor` of dtype `param_dtype`, and its memory."""
        return self._sent.fsdp_post_all_gather(all_gather_outputs, metadata, param_dtype, out=out)


class Float8Scales:
    """The scales of all float8 weights of a model: see [Note: One scale per weight]."""

    def __init__(
        self,
        shards: Sequence[ShardOf],
        process_group: dist.ProcessGroup,
        listeners: Sequence[CollectiveListener],
        runs_forward: Callable[[], bool],
    ) -> None:
        """Compute nothing yet.

        Args:
            shards: of the weights.
            process_group: the ranks that shard.
            listeners: called after each all-reduce.
            runs_forward: whether a forward of the model is running.
        """
        self._shards, self._process_group, self._listeners = shards, process_group, listeners
        self._runs_forward = runs_forward
        self._scales: Sequence[torch.Tensor] = ()
        self._versions: list[tuple[int, ...]] = []

    def prepare(self, *, may_differ: bool) -> None:
        """Compute the scales that the next all-gathers use. All ranks that shard call this before a forward.

        Args:
            may_differ: whether a weight may have been changed since the last call without a new version.
        """
        if not any(shard.is_sharded for shard in self._shards):
            return  # the unsharded weights have the scales of their all-gathers
        if may_differ or self._versions != [_version(shard) for shard in self._shards]:
            self.compute()

    @torch.no_grad()
    def compute(self) -> None:
        """Compute all scales. All ranks that shard call this: it issues one all-reduce of fp32."""
        self._versions = [_version(shard) for shard in self._shards]
        largest = largest_magnitudes([shard.padded for shard in self._shards])  # fp32
        op = dist.ReduceOp.MAX
        issued = IssuedCollective("all_reduce", largest, SCALES, self._process_group, op)
        issue(dist.all_reduce, issued, self._listeners, largest, op, self._process_group)
        scales: torch.Tensor = amax_to_scale(largest, DTYPE)
        powers = (scales.view(torch.int32) & _EXPONENT).view(torch.float32)  # at most the scale, and above half of it
        self._scales = torch.where(scales.isfinite(), powers, scales).unbind()

    def of(self, index: int) -> torch.Tensor:
        """Return the scale of the weight at this place: 0-D, fp32."""
        is_known = bool(self._scales) and self._versions[index] == _version(self._shards[index])
        if not is_known or not (self._runs_forward() or is_in_backward()):
            self.compute()
        return self._scales[index]


def _version(shard: ShardOf) -> tuple[int, ...]:
    """Return numbers of which one changes with each in-place change and each replacement of a shard."""
    tensors = shard.tensors
    return tensors[0].data_ptr(), *(tensor._version for tensor in tensors)


class _Linear(torch.autograd.Function):
    """`linear` with a float8 weight, which the backward divides by its scale again.

    torch's own would save the bf16 weight until the backward, although FSDP2 has resharded the parameter.
    """

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return (..., out), for input (..., in), weight (out, in) and bias (out,)."""
        ctx.save_for_backward(input, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return nn.functional.linear(input, _divided(weight), bias)

    @staticmethod
    @once_differentiable  # the quotient has no gradient function: a second derivative would leave the weight out
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        input, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_input = of_weight = of_bias = None
        with torch.autocast(gradient.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                of_input = rows.mm(_divided(weight)).view(input.shape)
            if ctx.needs_input_grad[1]:
                of_weight = rows.t().mm(input.reshape(-1, input.shape[-1]))
            if ctx.needs_input_grad[2]:
                of_bias = rows.sum(0).to(ctx.bias_dtype)
        return of_input, of_weight, of_bias


def _divided(weight: Any) -> torch.Tensor:
    """Return the values of a float8 weight in its own dtype, bf16: a new tensor."""
    values: torch.Tensor = weight._data.to(weight.dtype).div_(weight._scale)
    return values


def float8_forward(linear: nn.Linear, device_type: str) -> Callable[[Callable[..., Any]], Callable[..., torch.Tensor]]:
    """Return what makes the forward of a Linear whose unsharded weight may be float8, for `wrap_forward`."""

    def make(forward: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def run(input: torch.Tensor) -> torch.Tensor:
            if not isinstance(linear.weight, Float8TrainingTensor):
                result: torch.Tensor = forward(input)
                return result
            if torch.is_autocast_enabled(device_type):
                input = input.to(torch.get_autocast_dtype(device_type))
            return _Linear.apply(input, linear.weight, linear.bias)  # type: ignore[no-untyped-call,no-any-return]

        return run

    return make

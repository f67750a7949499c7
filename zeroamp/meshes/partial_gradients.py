"""`PartialGradients`: sums partial gradients over the tensor axis, by the rule of the data axes.

[Note: Partial gradients]
A rank of the tensor axis may hold a parameter whole, and use it on its part of the sequence, as the norms of sequence
parallelism. The parameter's gradient then is a DTensor that is `Partial`: the gradient is the sum over the axis. FSDP2
all-reduces each of them before it reduces the group, in the dtype of the gradient. So the sums are computed here, just
before FSDP2 takes the gradients: the partial gradients of a group are sent as one flat tensor in the group's
communication dtype, and summed in fp32 in the order of the tree. Each rank sums one chunk (an all-to-all), and the sums
are all-gathered. With native sums the backend's all-reduce sums them in the communication dtype.

FSDP2 gets the sums as gradients that are `Replicate`. They are in the smallest dtype that holds the dtype of the
gradients and the communication dtype, in which FSDP2 sends them to the data ranks next. FSDP2 reduces gradients of one
dtype. So if gradients in bf16 are communicated in fp32, the group's other gradients are cast to fp32 too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate

from zeroamp.hooks._torch.dtensor import local_parts
from zeroamp.hooks._torch.fsdp import all_gather
from zeroamp.hooks._torch.parameter_group import GroupParameter, ParameterGroup
from zeroamp.hooks.collectives.collective_calls import issue
from zeroamp.hooks.collectives.gradient_reduction import row_length, sum_over_ranks
from zeroamp.hooks.collectives.traffic import IssuedCollective
from zeroamp.hooks.collectives.tree_sum import compile_sum
from zeroamp.hooks.group_gradients import by_module
from zeroamp.hooks.observers.trace_labels import label
from zeroamp.planning.group_dtypes import group_dtypes
from zeroamp.planning.mesh import device_of, ranks_of
from zeroamp.policies.extensions import Extension
from zeroamp.wrapping.state import WrapState


class PartialGradients(Extension):
    """Sums partial gradients over the tensor axis. Made for a model with DTensors: see [Note: Partial gradients]."""

    def attach(self, model: nn.Module, state: WrapState) -> None:
        """Put the sums around FSDP2's reduction of each parameter group. No effect without a tensor axis."""
        axis, gradients = state.axes.tensor, by_module(state.gradients)
        if axis is None or axis.size() == 1:
            return
        for group in state.plan.groups:
            of_group = gradients[state.holders.get(group.name) or cast(FSDPModule, model.get_submodule(group.unit))]
            dtypes = group_dtypes(group.key, state.plan.policy, ranks_of(state.mesh))
            of_group.post_backward_of_fsdp = _SummedBefore(
                post_backward=of_group.post_backward_of_fsdp,
                group=of_group.group,
                name=group.name,
                ranks=axis.get_group(),
                communication_dtype=dtypes.communication,
                sums_in_tree_order=dtypes.sums_in_tree_order,
            )
            if dtypes.sums_in_tree_order:
                compile_sum(axis.size(), dtypes.communication, device_of(state.mesh))


@dataclass(frozen=True, kw_only=True, slots=True)
class _SummedBefore:
    """A post-backward of FSDP2's, before which the partial gradients of the group are summed if it reduces them."""

    post_backward: Callable[..., Any]
    group: ParameterGroup
    name: str
    ranks: dist.ProcessGroup
    """Those of the tensor axis."""
    communication_dtype: torch.dtype
    sums_in_tree_order: bool

    def __call__(self, *unused: Any) -> Any:
        """Sum the partial gradients, then reduce the group."""
        if self.group.reduces:
            self._sum()
        return self.post_backward(*unused)

    def _sum(self) -> None:
        gradients = [(each, gradient) for each in self.group.parameters if (gradient := _sum_of(each)) is not None]
        partial = [(each, gradient) for each, gradient in gradients if _is_partial(gradient)]
        if not partial:
            return
        dtype = torch.promote_types(partial[0][1].dtype, self.communication_dtype)
        for parameter, gradient in gradients:
            if gradient.dtype != dtype and not _is_partial(gradient):
                parameter.set_sum(gradient.to(dtype))
        parts = local_parts(gradient for _, gradient in partial)
        flat = torch.cat([part.reshape(-1).to(self.communication_dtype) for part in parts])
        issued = IssuedCollective("all_reduce", flat, self.name, self.ranks)
        with label("all_reduce", self.name, self.communication_dtype):
            total = issue(self._all_reduce, issued, (), flat, dtype)
        sums = total.split([part.numel() for part in parts])
        for (parameter, gradient), whole in zip(partial, sums, strict=True):
            mesh, local = cast(DTensor, gradient).device_mesh, whole.view(gradient.shape)
            parameter.set_sum(DTensor.from_local(local, mesh, [Replicate()], run_check=False))

    def _all_reduce(self, flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of a flat tensor over the tensor axis, in `dtype`."""
        if not self.sums_in_tree_order:
            dist.all_reduce(flat, group=self.ranks)
            return flat.to(dtype)
        num_ranks, numel = self.ranks.size(), flat.numel()
        length = row_length(-(-numel // num_ranks), flat.dtype, flat.device)
        chunks = nn.functional.pad(flat, (0, num_ranks * length - numel))
        total = flat.new_empty(length, dtype=torch.float32)
        sum_over_ranks(chunks, torch.empty_like(chunks), total, 1, self.ranks)
        sums = flat.new_empty(num_ranks * length, dtype=dtype)
        all_gather(sums, total.to(dtype), self.ranks, async_op=False)
        return sums[:numel]


def _sum_of(parameter: GroupParameter) -> torch.Tensor | None:
    """Return the unsharded gradient of all micro-batches; None without one. FSDP2 would add the last one next."""
    gradient = None if parameter.unsharded is None else parameter.unsharded.grad
    if parameter.own_sum is None or gradient is None:
        return gradient if parameter.own_sum is None else parameter.own_sum
    parameter.set_sum(parameter.own_sum.add_(gradient))
    return parameter.own_sum


def _is_partial(gradient: torch.Tensor) -> bool:
    return isinstance(gradient, DTensor) and gradient.placements == (Partial(),)

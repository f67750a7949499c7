"""`PartialGradients`: sums partial gradients over the tensor axis, by the rule of the data axes.

[Note: Partial gradients]
A rank of the tensor axis may hold a parameter whole and use it on its part of the sequence, as sequence parallelism
does with norms. The gradient is a DTensor that is `Partial` then: it is the sum over the axis. FSDP2 would all-reduce
each of them in the dtype of the gradient (pytorch issue 190626). Instead they are summed just before FSDP2 takes the
gradients of a group: in one flat tensor, by an all-reduce in the order of the tree (`gradient_reduction.py`), which
sends the group's communication dtype and sums in fp32. With native sums it is the backend's all-reduce.

FSDP2 gets sums that are `Replicate`, and sends them to the data ranks in the communication dtype. It reduces gradients
of one dtype. So if gradients in bf16 are communicated in fp32, the group's other gradients are cast to fp32 too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate

from zeroamp.hooks._torch.dtensor import local_parts
from zeroamp.hooks._torch.parameter_group import GroupParameter
from zeroamp.hooks.collectives.collective_calls import issue
from zeroamp.hooks.collectives.gradient_reduction import all_reduce_in_tree_order, variants_over_ranks
from zeroamp.hooks.collectives.traffic import IssuedCollective
from zeroamp.hooks.collectives.tree_sum import compile_sum
from zeroamp.hooks.group_gradients import GroupGradients, by_module
from zeroamp.hooks.observers.trace_labels import label
from zeroamp.planning.group_dtypes import group_dtypes
from zeroamp.planning.mesh import device_of, ranks_of
from zeroamp.wrapping.extensions import WrapExtension
from zeroamp.wrapping.state import WrapState


class PartialGradients(WrapExtension):
    """Sums partial gradients over the tensor axis. Made for a model with DTensors: see [Note: Partial gradients]."""

    def attach(self, model: nn.Module, state: WrapState) -> None:
        """Put the sums around FSDP2's reduction of each parameter group. No effect without a tensor axis."""
        axis, gradients = state.axes.tensor, by_module(state.gradients)
        if axis is None or axis.size() == 1:
            return
        for group in state.plan.groups:
            of_group = gradients[state.holders.get(group.name) or cast(FSDPModule, model.get_submodule(group.unit))]
            dtypes, of_sums = (
                group_dtypes(group.key, state.plan.policy, ranks_of(state.mesh), sends_sums=sends_sums)
                for sends_sums in (False, True)
            )
            of_group.post_backward_of_fsdp = _SummedBefore(
                reduce=of_group.post_backward_of_fsdp,
                gradients=of_group,
                name=group.name,
                ranks=axis.get_group(),
                communication_dtype=dtypes.communication,
                communication_of_sums=of_sums.communication,
                sums_in_tree_order=dtypes.sums_in_tree_order,
            )
            if dtypes.sums_in_tree_order:
                for dtype in dict.fromkeys((dtypes.communication, of_sums.communication)):
                    for variant in dict.fromkeys(variants_over_ranks(axis.size(), dtype)):
                        compile_sum(variant, device_of(state.mesh))


@dataclass(frozen=True, kw_only=True, slots=True)
class _SummedBefore:
    """The post-backward of a group. It sums the partial gradients, if the group reduces now, and then calls FSDP2's."""

    reduce: Callable[..., Any]
    """FSDP2's post-backward."""
    gradients: GroupGradients
    name: str
    ranks: dist.ProcessGroup
    """Those of the tensor axis."""
    communication_dtype: torch.dtype
    communication_of_sums: torch.dtype
    """The communication dtype of sums of several micro-batches."""
    sums_in_tree_order: bool

    def __call__(self, *unused: Any) -> Any:
        """Sum the partial gradients, then reduce the group."""
        if self.gradients.group.reduces:
            self._sum(self.communication_of_sums if self.gradients.reduces_sums else self.communication_dtype)
        return self.reduce(*unused)

    def _sum(self, communication_dtype: torch.dtype) -> None:
        parameters = self.gradients.group.parameters
        gradients = {each: gradient for each in parameters if (gradient := _sum_of(each)) is not None}
        partial = [gradient for gradient in gradients.values() if _is_partial(gradient)]
        if not partial:
            return
        dtype = torch.promote_types(partial[0].dtype, communication_dtype)
        flat = torch.cat([part.reshape(-1).to(communication_dtype) for part in local_parts(partial)])
        issued = IssuedCollective("all_reduce", flat, self.name, self.ranks)
        with label("all_reduce", self.name, communication_dtype):
            issue(all_reduce_in_tree_order if self.sums_in_tree_order else _all_reduce, issued, (), flat, self.ranks)
        sums = iter(torch.split(flat, [gradient.numel() for gradient in partial]))
        for parameter, gradient in gradients.items():
            if _is_partial(gradient):
                local, mesh = next(sums).view(gradient.shape), gradient.device_mesh
                parameter.set_sum(DTensor.from_local(local.to(dtype), mesh, [Replicate()], run_check=False))
            elif gradient.dtype != dtype:
                parameter.set_sum(gradient.to(dtype))


def _all_reduce(flat: torch.Tensor, ranks: dist.ProcessGroup) -> None:
    dist.all_reduce(flat, group=ranks)


def _sum_of(parameter: GroupParameter) -> torch.Tensor | None:
    """Return the unsharded gradient of all micro-batches; None without one. FSDP2 would add the last one next."""
    gradient = None if parameter.unsharded is None else parameter.unsharded.grad
    if parameter.own_sum is None or gradient is None:
        return gradient if parameter.own_sum is None else parameter.own_sum
    parameter.set_sum(parameter.own_sum.add_(gradient))
    return parameter.own_sum


def _is_partial(gradient: torch.Tensor) -> TypeGuard[DTensor]:
    return isinstance(gradient, DTensor) and gradient.placements == (Partial(),)

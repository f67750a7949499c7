"""Raises one error for what a mesh with a context, tensor, expert or pipeline axis is not supported with.

`wrap_model` raises it before it shards anything. `docs/meshes.md` lists what is not supported.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.dtensor import split_dim
from zeroamp.planning.mesh import shard_size
from zeroamp.planning.mesh_axes import MeshAxes
from zeroamp.planning.plan import Plan
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import WrapError
from zeroamp.policies.extensions import extensions_of
from zeroamp.policies.policy import Policy

_ALL_REDUCED = "replicated_with_grad_allreduce"
_CONTEXT, _MODEL = "A mesh with a context axis", "A mesh with a tensor or expert axis"
_STAGES = "A mesh with a pipeline axis"


@torch.no_grad()
def refuse_combinations(model: nn.Module, plan: Plan, axes: MeshAxes, *, materialize: bool) -> None:
    """Raise WrapError for what the model, its plan and the axes of the mesh do not allow. Communicates nothing.

    A mesh whose ranks are all for data never raises.
    """
    of_policy = _of_policy(plan.policy, is_plain=axes.is_plain, num_context=axes.num_context)
    _refuse(of_policy, _CONTEXT if axes.is_plain else _MODEL)
    if not axes.is_plain:
        _refuse((*_of_axes(model, plan, axes), *_of_parameters(model, axes, materialize=materialize)), _MODEL)
    if axes.stages is not None:
        _refuse(_of_pipeline(plan), _STAGES, page="pipelines")


def _refuse(found: "Iterator[str] | tuple[str, ...]", axis: str, page: str = "meshes") -> None:
    if texts := "; ".join(found):
        raise WrapError(f"{axis} is not supported with {texts}. Leave one of the two out: docs/{page}.md.")


def _of_pipeline(plan: Plan) -> Iterator[str]:
    """Yield what a part of a pipeline does not allow. torch's schedules run the backwards, not `TrainStep`."""
    if (steps := plan.policy.gradient_accumulation_steps) > 1:
        yield f"gradient_accumulation_steps {steps}, whose place the schedule's n_microbatches takes"
    if plan.replicated is not None:
        yield f"the 0-D parameter {plan.replicated.params[0].fqn}"
    yield from (extension.needs_train_step for extension in plan.extensions if extension.needs_train_step)
    if (dtype := plan.policy.grad_accum_dtype) != torch.float32 and torch.__version__ >= (2, 15):  # type: ignore[operator]
        yield f"data_types.grad_accum_dtype {short_name(dtype)} on torch 2.15, where autograd sums"
    if plan.policy.offload.to_cpu:
        yield "zero_optimization.offload_param"


def _of_policy(policy: Policy, *, is_plain: bool, num_context: int) -> Iterator[str]:
    """Yield the keys of the config that the axes do not allow."""
    if is_plain and num_context == 1:
        return
    yield from (extension.data_axes_only for extension in extensions_of(policy) if extension.data_axes_only)
    if is_plain:
        return
    if policy.stage == 0:
        yield "ZeRO stage 0 (stage 1 retains unsharded parameters between optimizer steps, too)"
    if policy.hpz_partition_size > 1:
        yield "zero_optimization.zero_hpz_partition_size"
    if policy.offload.to_cpu:
        yield "zero_optimization.offload_param"


def _of_axes(model: nn.Module, plan: Plan, axes: MeshAxes) -> Iterator[str]:
    """Yield the other axes that a tensor or expert axis is not supported with."""
    if axes.experts is not None:
        if axes.tensor is not None:
            yield "both of them"
        if axes.num_context > 1:
            yield "a context axis beside experts"
        if axes.fsdp.ndim > 1:
            yield "replicas (HSDP) beside experts"
    styles = getattr(model, "_tp_plan", None)  # of a transformers model
    is_all_reduced = isinstance(styles, dict) and _ALL_REDUCED in styles.values()
    if is_all_reduced and plan.policy.stage == 1 and axes.tensor is not None:
        # The style's hook would add the sums of earlier micro-batches once more.
        yield f"transformers' style {_ALL_REDUCED} at ZeRO stage 1 (use stage 2)"


def _of_parameters(model: nn.Module, axes: MeshAxes, *, materialize: bool) -> Iterator[str]:
    """Yield the first parameter of each kind that cannot be sharded beside a tensor or expert axis."""
    num_shards = shard_size(axes.fsdp if axes.experts is None else axes.experts)
    named = dict(model.named_parameters())
    split = {fqn: parameter for fqn, parameter in named.items() if isinstance(parameter, DTensor)}
    if fqn := next((fqn for fqn, parameter in split.items() if _is_uneven(parameter)), ""):
        yield f"dimensions that the axis does not divide ({fqn})"
    if fqn := next((fqn for fqn, parameter in split.items() if _is_padded(parameter, num_shards)), ""):
        yield f"dimensions whose parts the data ranks do not divide ({fqn})"
    if materialize and (fqn := next((fqn for fqn, each in named.items() if each.is_meta), "")):
        yield f"initialisation of parameters on the meta device ({fqn}; pass materialize=False)"


def _is_uneven(parameter: DTensor) -> bool:
    dims = ((axis, split_dim(kind)) for axis, kind in enumerate(parameter.placements))
    return any(dim is not None and parameter.shape[dim] % parameter.device_mesh.size(axis) for axis, dim in dims)


def _is_padded(parameter: DTensor, num_shards: int) -> bool:
    """Return whether dimension 0 is distributed evenly over an axis, and FSDP2 would shard it too, with padding."""
    is_twice = any(split_dim(kind) == 0 for kind in parameter.placements) and not _is_uneven(parameter)
    return is_twice and bool(parameter.to_local().shape[0] % num_shards)

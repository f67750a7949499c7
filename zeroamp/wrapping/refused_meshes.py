"""The combinations of tensor, context and expert parallelism with other options that are not supported.

`wrap_model` raises for each by its name, before it shards anything. `docs/meshes.md` has the table, which a test makes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.dtensor import split_dim
from zeroamp.planning.mesh import shard_size
from zeroamp.planning.mesh_axes import AxisSizes, MeshAxes
from zeroamp.planning.parameter_uses import has_own_storage_class
from zeroamp.planning.plan import Plan
from zeroamp.policies.errors import WrapError
from zeroamp.policies.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """The arguments of a `wrap_model` call that combinations are checked against."""

    model: nn.Module
    plan: Plan
    axes: MeshAxes
    materialize: bool

    def first(self, applies: Callable[[torch.Tensor], bool]) -> str | None:
        """Return the FQN of the first parameter for which `applies` is true, or None."""
        return next((fqn for fqn, parameter in self.model.named_parameters() if applies(parameter)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """A combination that is not supported, and the parts of its error."""

    name: str
    why: str
    """What would go wrong, or is missing."""
    instead: str
    """What the user can do."""
    applies: Callable[[Case], bool | str | None]
    """Returns whether a case has this combination. The result may be the FQN of the parameter that has it."""
    is_of_policy: bool = False
    """Whether `applies` reads only the policy, `axes.is_plain` and `axes.num_context`: sizes of axes suffice."""


def refuse_combinations(model: nn.Module, plan: Plan, axes: MeshAxes, *, materialize: bool) -> None:
    """Raise WrapError for the first of `COMBINATIONS` that the arguments have. Communicates nothing.

    A mesh whose ranks are all for data never raises.
    """
    if axes.is_plain and axes.num_context == 1:
        return
    _refuse(COMBINATIONS, Case(model=model, plan=plan, axes=axes, materialize=materialize))


def refuse_sizes(policy: Policy, sizes: AxisSizes) -> None:
    """Raise WrapError for the first of `COMBINATIONS` that a policy has with axes of these sizes, for any model."""
    axes: Any = SimpleNamespace(is_plain=not sizes.distributes_parameters, num_context=sizes.context)
    if axes.is_plain and axes.num_context == 1:
        return
    case = Case(model=nn.Module(), plan=cast(Any, SimpleNamespace(policy=policy)), axes=axes, materialize=False)
    _refuse((each for each in COMBINATIONS if each.is_of_policy), case)


def _refuse(combinations: Iterable[Combination], case: Case) -> None:
    for each in combinations:
        if found := each.applies(case):
            where = f" ({found})" if isinstance(found, str) else ""
            raise WrapError(f"{each.name}{where} is not supported: {each.why}. {each.instead}")


def refuse_model_axes(axes: MeshAxes, what: str, instead: str) -> None:
    """Raise WrapError if there is a tensor or expert axis, for a function that supports neither."""
    if not axes.is_plain:
        raise WrapError(f"{what} is not supported with tensor or expert parallelism. {instead}")


def _has_tensor(case: Case) -> bool:
    return case.axes.tensor is not None


def _has_experts(case: Case) -> bool:
    return case.axes.experts is not None


def _is_split(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor)


def _is_quantized(parameter: torch.Tensor) -> bool:
    is_packed = hasattr(parameter, "quant_state") or not parameter.is_floating_point()
    return _is_split(parameter) and (is_packed or has_own_storage_class(parameter))


def _is_uneven(parameter: torch.Tensor) -> bool:
    """Return whether an axis' size does not divide the dimension that is distributed over it."""
    if not isinstance(parameter, DTensor):
        return False
    dims = ((axis, split_dim(kind)) for axis, kind in enumerate(parameter.placements))
    return any(dim is not None and parameter.shape[dim] % parameter.device_mesh.size(axis) for axis, dim in dims)


def _is_padded(parameter: torch.Tensor, num_shards: int) -> bool:
    """Return whether dimension 0 is distributed over an axis, and FSDP2 would shard it too, with padding."""
    if not isinstance(parameter, DTensor):
        return False
    is_twice = any(split_dim(kind) == 0 for kind in parameter.placements)
    return is_twice and bool(parameter.to_local().shape[0] % num_shards)


def _padded(case: Case) -> str | None:
    num_shards = shard_size(case.axes.fsdp if case.axes.experts is None else case.axes.experts)
    return case.first(lambda parameter: _is_padded(parameter.detach(), num_shards))


def _is_partial(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(kind.is_partial() for kind in parameter.placements)


_ALL_REDUCED = "replicated_with_grad_allreduce"


def _all_reduces_sums(case: Case) -> bool:
    styles = getattr(case.model, "_tp_plan", None)  # of a transformers model
    return (
        _has_tensor(case)
        and case.plan.policy.stage == 1
        and isinstance(styles, dict)
        and _ALL_REDUCED in styles.values()
    )


COMBINATIONS: tuple[Combination, ...] = (
    Combination(
        name="zeroamp.reproducible on a mesh with a context, tensor or expert axis",
        why="the order in which micro-batches are added is defined for data ranks only",
        instead="Leave one of the two out.",
        applies=lambda case: case.plan.policy.reproducible,
        is_of_policy=True,
    ),
    Combination(
        name="zeroamp.param_gather_dtype on a mesh with a context, tensor or expert axis",
        why="it is not tested",
        instead="Leave the key out.",
        applies=lambda case: case.plan.policy.param_gather_dtype is not None,
        is_of_policy=True,
    ),
    Combination(
        name="Tensor parallelism together with expert parallelism",
        why="experts and other parameters would be distributed over different axes beside the data axes",
        instead="Leave one of the two out.",
        applies=lambda case: _has_tensor(case) and _has_experts(case),
    ),
    Combination(
        name="Expert parallelism together with context parallelism",
        why="the experts' gradients would be averaged over other ranks than their tokens come from",
        instead="Leave one of the two out.",
        applies=lambda case: _has_experts(case) and case.axes.num_context > 1,
    ),
    Combination(
        name="Expert parallelism with replicas (HSDP)",
        why="the experts' ranks would have two axes",
        instead='Pass a mesh of two axes, ("dp", "ep").',
        applies=lambda case: _has_experts(case) and case.axes.fsdp.ndim > 1,
    ),
    Combination(
        name="Tensor or expert parallelism at ZeRO stage 0",
        why="stage 0 shards over one rank, by a mesh of its own that is not a slice of the model's mesh",
        instead="Set zero_optimization.stage to 1: parameters stay unsharded between two optimizer steps.",
        applies=lambda case: not case.axes.is_plain and case.plan.policy.stage == 0,
        is_of_policy=True,
    ),
    Combination(
        name=f"transformers' style {_ALL_REDUCED} at ZeRO stage 1",
        why="its hook would add the sums of earlier micro-batches over the tensor axis once more",
        instead="Set zero_optimization.stage to 2: gradients are reduced after every micro-batch.",
        applies=_all_reduces_sums,
    ),
    Combination(
        name="Tensor or expert parallelism with a secondary partition (hpZ)",
        why="FSDP2 cannot shard a DTensor over a part of the data ranks after the forward",
        instead="Leave zero_optimization.zero_hpz_partition_size out.",
        applies=lambda case: not case.axes.is_plain and case.plan.policy.hpz_partition_size > 1,
        is_of_policy=True,
    ),
    Combination(
        name="Tensor or expert parallelism with offloading",
        why="it is not tested: gradients of DTensors would be reduced over two axes, and then copied to the CPU",
        instead="Leave offload_param and offload_optimizer out.",
        applies=lambda case: not case.axes.is_plain and case.plan.policy.offload.to_cpu,
        is_of_policy=True,
    ),
    Combination(
        name="Tensor or expert parallelism of a model on the meta device that wrap_model is to initialise",
        why="an initialiser sees whole modules, but their parameters are distributed",
        instead="Pass materialize=False, call model.to_empty(device=...) after wrap_model, and initialise the model.",
        applies=lambda case: (
            not case.axes.is_plain and case.materialize and case.first(lambda parameter: parameter.is_meta)
        ),
    ),
    Combination(
        name="Tensor or expert parallelism with zeroamp.symmetric_memory",
        why="it is not tested",
        instead="Leave the key out.",
        applies=lambda case: not case.axes.is_plain and case.plan.policy.symmetric_memory,
        is_of_policy=True,
    ),
    Combination(
        name="Tensor or expert parallelism of quantized parameters",
        why="packed values do not have the dimensions of the weight",
        instead="Quantize no module that is parallelized.",
        applies=lambda case: not case.axes.is_plain and case.first(_is_quantized),
    ),
    Combination(
        name="A parameter that is a sum over the ranks of an axis (Partial)",
        why="FSDP2 shards values, not terms of a sum",
        instead="Distribute it as Shard or Replicate.",
        applies=lambda case: case.first(_is_partial),
    ),
    Combination(
        name="A 0-D parameter that is a DTensor",
        why="every rank holds a 0-D parameter whole, and the step's all-reduce averages its gradient as a plain tensor",
        instead="Leave it out of the parallelization, and use it where all ranks of the axis compute the same.",
        applies=lambda case: case.first(lambda parameter: _is_split(parameter) and parameter.dim() == 0),
    ),
    Combination(
        name="A parameter that is distributed unevenly over a tensor or expert axis",
        why="FSDP2 cannot describe shards of parts of different sizes",
        instead="Pad the dimension to a multiple of the axis, or leave the parameter out of the parallelization.",
        applies=lambda case: case.first(_is_uneven),
    ),
    Combination(
        name="A dimension that is distributed over a tensor or expert axis and that the data ranks do not divide",
        why="FSDP2 would shard the same dimension with padding",
        instead="Use a number of data ranks that divides the part of one rank.",
        applies=_padded,
    ),
    Combination(
        name="Tensor or expert parallelism of parameters in ignored_params",
        why="the gradient norm would count one rank's part as the whole parameter",
        instead="Do not parallelize them, or let zeroamp shard them.",
        applies=lambda case: (
            not case.axes.is_plain
            and next((fqn for fqn in case.plan.ignored_fqns if _is_split(case.model.get_parameter(fqn))), None)
        ),
    ),
)
"""All combinations that are not supported, in the order in which they are checked."""

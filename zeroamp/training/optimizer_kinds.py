"""Decides how an optimizer is updated (on shards, with whole matrices, on DTensors), and refuses unsupported ones.

docs/optimizers.md has a table of optimizers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.optimizer import has_own_step
from zeroamp.planning.mesh import local_part, num_shards_of
from zeroamp.policies.errors import StepError

Kind = Literal["shards", "muon", "DTensors"]
"""`shards`: the optimizer gets this rank's shards as plain tensors. `muon`: `torch.optim.Muon`, whose matrices are
gathered on one rank each. `DTensors`: the optimizer gets the sharded parameters as they are, and torch communicates
where an operation needs it."""

ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Element-wise optimizers whose state has the parameter's shape or one element. Subclasses may update differently."""

GUARDED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers whose fused kernels update nothing if `found_inf`, a number on the device, is 1."""

WHOLE_PARAMETERS = (
    "torch.optim.Adafactor",
    "torch.optim._adafactor.Adafactor",  # where torch does not set the public module's name
    "transformers.optimization.Adafactor",
)
"""Optimizers that need the rows and columns of whole matrices, or the root mean square of a whole parameter."""

_INSTEAD = (
    "Use torchao.optim.AdamW8bit or AdamW4bit, whose state is small too, torch.optim.Muon for matrices, or "
    '"zero_optimization": {"stage": 0}, where every rank holds whole parameters. docs/optimizers.md has a table.'
)


def kind_of(optimizer: torch.optim.Optimizer, *, on_shards: bool) -> Kind:
    """Return how an optimizer is updated. `on_shards`: the caller states that the optimizer is element-wise."""
    if on_shards or type(optimizer) in ELEMENTWISE or _is_one_of(optimizer, WHOLE_PARAMETERS):
        return "shards"
    if type(optimizer) is torch.optim.Muon and not has_own_step(optimizer):
        return "muon"
    return "DTensors"


def is_guarded_by_the_device(optimizer: torch.optim.Optimizer, *, on_shards: bool) -> bool:
    """Return whether the optimizer's kernels skip the update if `found_inf`, a number on the device, is 1.

    True for torch's fused Adam, AdamW and SGD. For any other optimizer, the host must decide before the update whether
    to skip it. See [Note: A guarded update] in `zeroamp.training.update`.
    """
    is_fused = all(group.get("fused") is True for group in optimizer.param_groups)
    return not on_shards and type(optimizer) in GUARDED and is_fused


def is_bound_to_shard(parameter: torch.Tensor, state: Mapping[str, Any]) -> bool:
    """Return whether a parameter's state is tied to this rank's shard of the parameter, so that it cannot be resharded.

    True if a plain tensor has the shard's shape: 8-bit optimizers quantize in blocks of the shard, for example.
    """
    if num_shards_of(parameter) == 1:
        return False
    with torch.no_grad():
        shape = local_part(parameter).shape
    plain = (value for value in state.values() if isinstance(value, torch.Tensor) and not isinstance(value, DTensor))
    return any(value.shape == shape for value in plain)


def resolve_overrides(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of bitsandbytes find the parameters that its `GlobalOptimManager` has other settings for.

    In its first step it would search its param groups for them by identity, but the groups then hold shards. So call
    this while the groups hold the model's parameters. bitsandbytes stores the settings by position in the groups.
    """
    if isinstance(optimizer, _Overridable) and not optimizer.initialized:
        optimizer.check_overrides()
        optimizer.mng.register_parameters(optimizer.param_groups)


@runtime_checkable
class _Overridable(Protocol):
    """The interface of bitsandbytes' optimizers that `resolve_overrides` uses."""

    initialized: bool
    mng: Any
    param_groups: list[dict[str, Any]]

    def check_overrides(self) -> None: ...


def checked_on_shards(on_shards: bool | Sequence[bool], num_optimizers: int) -> tuple[bool, ...]:
    """Return one value per optimizer.

    Raises:
        StepError: `on_shards` is neither a bool nor one bool per optimizer.
    """
    values = (on_shards,) * num_optimizers if isinstance(on_shards, bool) else on_shards
    if not isinstance(values, Sequence) or [type(value) for value in values] != [bool] * num_optimizers:
        raise StepError(
            f"TrainStep(on_shards=) must be True, False, or a list of one bool for each of the {num_optimizers} "
            f"optimizers, but is {on_shards!r}."
        )
    return tuple(values)


def refuse_unsupported(optimizer: torch.optim.Optimizer, *, on_shards: bool) -> None:
    """Raise StepError for an optimizer that would fail on sharded parameters, or update them wrongly.

    Also for settings of an optimizer that have no effect on parameters stored in fp32.
    """
    name = f"TrainStep was given {_full_name(optimizer)}"
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise StepError(
            f"{name}, which takes sparse gradients only. Gradients of sharded parameters are dense: use torch.optim."
            "AdamW."
        )
    if on_shards and isinstance(optimizer, torch.optim.Muon):
        raise StepError(
            f"{name} with on_shards=True, but it needs whole matrices. Leave on_shards out: TrainStep gathers each "
            "matrix on one rank. With several optimizers, pass a list of one bool each, False for Muon."
        )
    if is_of_bitsandbytes(optimizer) and not on_shards:
        raise StepError(
            f"{name}, whose kernels take plain tensors. Pass TrainStep(model, optimizer, on_shards=True): it then "
            "updates this rank's shards, and quantizes its state in blocks of them."
        )
    has_norms = is_of_bitsandbytes(optimizer) and _has_norms_of_updates(optimizer)
    needs_whole = has_norms or _is_one_of(optimizer, WHOLE_PARAMETERS)
    if needs_whole and (ranks := _most_shards(optimizer)) > 1:
        raise StepError(
            f"{name}, which needs statistics of whole parameters, but each rank holds a shard only, one of {ranks}. "
            f"{_INSTEAD}"
        )
    _refuse_low_storage(optimizer, name)


def refuse_on_two_axes(optimizer: torch.optim.Optimizer, *, on_shards: bool) -> None:
    """Raise StepError for an optimizer that is not updated on shards, with tensor or expert parallelism."""
    if kind_of(optimizer, on_shards=on_shards) != "shards":
        raise StepError(
            f"TrainStep was given {_full_name(optimizer)}, which is not updated on plain shards. With tensor or expert "
            "parallelism that is not supported, because parameters are DTensors on meshes of one axis and of two. "
            "Use torch.optim.AdamW or another of docs/optimizers.md that is updated on shards, or pass on_shards=True "
            "if the optimizer is element-wise."
        )


def _refuse_low_storage(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Refuse settings for parameters stored in bf16: `TrainStep` trains parameters that are stored in fp32."""
    if getattr(optimizer, "bf16_stochastic_round", False):
        setting = "bf16_stochastic_round=True"
    elif any(group.get("kahan_sum") is True for group in optimizer.param_groups):
        setting = "kahan_sum=True"
    else:
        return
    raise StepError(
        f"{name} with {setting}, which is for parameters stored in bf16. Trainable parameters are stored in fp32 here, "
        "where the setting has no effect. Leave it out."
    )


def is_of_bitsandbytes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is one of bitsandbytes. `TrainStep` takes these only with `on_shards=True`."""
    return any(cls.__module__.startswith("bitsandbytes.") for cls in type(optimizer).__mro__)


def _has_norms_of_updates(optimizer: Any) -> bool:
    """Return whether an optimizer of bitsandbytes scales updates by norms of whole parameters, as LAMB and LARS do."""
    return bool(getattr(getattr(optimizer, "args", None), "max_unorm", 0.0) > 0.0)


def _most_shards(optimizer: torch.optim.Optimizer) -> int:
    return max(
        (num_shards_of(parameter) for group in optimizer.param_groups for parameter in group["params"]), default=1
    )


def _is_one_of(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> bool:
    return any(f"{cls.__module__}.{cls.__qualname__}" in names for cls in type(optimizer).__mro__)


def _full_name(optimizer: torch.optim.Optimizer) -> str:
    """Return module and class: several libraries have an optimizer of the same name."""
    return f"{type(optimizer).__module__.partition('.')[0]}'s {type(optimizer).__name__}"

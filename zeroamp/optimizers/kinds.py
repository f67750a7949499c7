"""How optimizers are updated that are not torch's element-wise ones: Muon, Adafactor, those of bitsandbytes and others.

docs/optimizers.md has a table of optimizers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.optimizers.bf16_states import Bf16StatesAdamW
from zeroamp.optimizers.muon import update_matrices_in_steps
from zeroamp.planning.mesh import num_shards_of
from zeroamp.policies.errors import StepError
from zeroamp.wrapping.optimizer_hooks import Kind, full_name, has_own_step

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


def kind_of_other(optimizer: torch.optim.Optimizer) -> Kind:
    """Return how an optimizer is updated that is not one of torch's element-wise ones."""
    if _is_one_of(optimizer, WHOLE_PARAMETERS) or type(optimizer) is Bf16StatesAdamW:
        return "shards"
    if type(optimizer) is torch.optim.Muon and not has_own_step(optimizer):
        return "muon"
    return "DTensors"


def resolve_overrides(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of bitsandbytes find the parameters that its `GlobalOptimManager` has other settings for.

    In its first step it would search its param groups for them by identity, but the groups then hold shards. So call
    this while the groups hold the model's parameters. bitsandbytes stores the settings by position in the groups.
    """
    found: Any = optimizer
    if is_of_bitsandbytes(optimizer) and not found.initialized:
        found.check_overrides()
        found.mng.register_parameters(found.param_groups)


def prepare_other(optimizer: torch.optim.Optimizer, roots: Sequence[ref[nn.Module]]) -> None:
    """Prepare an optimizer for a loop without `TrainStep`. It has parameters of the wrapped models `roots`.

    Raises:
        StepError: `refuse_other` raises, the optimizer needs whole parameters, torch cannot run its operations on
            DTensors, or a Muon has matrices of several models.
    """
    where = "A loop without TrainStep steps"
    refuse_other(optimizer, on_shards=False, where=where)
    # Rprop assigns to the elements that a mask selects, unless it is capturable.
    is_by_mask = isinstance(optimizer, torch.optim.Rprop) and not optimizer.defaults["capturable"]
    if is_by_mask or _is_one_of(optimizer, WHOLE_PARAMETERS):
        raise StepError(
            f"{where} {full_name(optimizer)}, whose operations torch cannot run on DTensors. Call "
            "zeroamp.TrainStep(model, optimizer), which updates plain tensors."
        )
    if kind_of_other(optimizer) == "muon":
        if len(roots) > 1:
            raise StepError(
                f"Muon.step was called, but the optimizer holds matrices of {len(roots)} wrapped models. Build one "
                "Muon for each model."
            )
        update_matrices_in_steps(roots[0], optimizer)


def refuse_other(optimizer: torch.optim.Optimizer, *, on_shards: bool, where: str = "TrainStep was given") -> None:
    """Raise StepError for an optimizer that would fail on sharded parameters, or update them wrongly.

    The text begins with `where`.
    """
    name = f"{where} {full_name(optimizer)}"
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


@contextmanager
def replicated_apart(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Move replicated parameters to param groups of their own: foreach kernels refuse a mixture with DTensors."""
    own = [(group, group["params"]) for group in optimizer.param_groups]
    try:
        for group, params in own:
            replicated = [parameter for parameter in params if not isinstance(parameter, DTensor)]
            if 0 < len(replicated) < len(params):
                optimizer.param_groups.append({**group, "params": replicated})
                group["params"] = [parameter for parameter in params if isinstance(parameter, DTensor)]
        yield
    finally:
        del optimizer.param_groups[len(own) :]
        for group, params in own:
            group["params"] = params

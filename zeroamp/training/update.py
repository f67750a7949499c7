"""The optimizer's update of this rank's shards, without a dispatch of DTensors for each of its operations.

[Note: The same bits, sooner]
AdamW on DTensors runs about a dozen operations per parameter, and each is dispatched twice: by DTensor, in Python, and
on the shard. An element-wise update gives the same bits on the shards as on the whole parameter. So `step` replaces the
DTensors of such an optimizer by their plain shards, and puts the DTensors back afterwards.
Only element-wise optimizers qualify: LAMB and Adafactor need statistics of the whole parameter. A step that creates
state, such as the first, runs on DTensors; later steps change that state in place.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.optimizer import has_own_step, has_step_hooks
from zeroamp.planning.mesh import local_part

ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Element-wise optimizers whose state has the parameter's shape or one element. Subclasses may update differently."""


def step(optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.step()`, on plain shards if that gives the same bits: see [Note: The same bits, sooner]."""
    if not works_on_shards(optimizer):
        with _replicated_apart(optimizer):
            optimizer.step()
        return
    with _on_shards(optimizer):
        optimizer.step()


@contextmanager
def _replicated_apart(optimizer: torch.optim.Optimizer) -> Iterator[None]:
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


def works_on_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` would run on plain shards, with the gradients and the state that the optimizer has now.

    Optimizers with step hooks, or with a `step` of the instance (a compiled one, say), run on DTensors.
    """
    return (
        type(optimizer) in ELEMENTWISE
        and not has_own_step(optimizer)
        and not has_step_hooks(optimizer)
        and all(_is_ready(group, optimizer.state) for group in optimizer.param_groups)
    )


def _is_ready(group: dict[str, Any], states: dict[torch.Tensor, dict[str, Any]]) -> bool:
    return not group["differentiable"] and all(
        _is_like(parameter, parameter.grad)
        and parameter.grad.dtype == parameter.dtype
        and _has_state(parameter, states.get(parameter, {}), group)
        for parameter in group["params"]
        if parameter.grad is not None
    )


def _has_state(parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> bool:
    """Whether a parameter's state is complete, and each value is sharded like the parameter or a plain 0-D tensor."""
    if "momentum" not in group and not state:  # Adam and AdamW create their state in this step
        return False
    if group.get("momentum") and state.get("momentum_buffer") is None:  # SGD creates it in this step
        return False
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return all(_is_like(parameter, value) or (value.dim() == 0 and type(value) is torch.Tensor) for value in tensors)


def _is_like(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether two tensors are sharded alike, or neither is."""
    if not isinstance(parameter, DTensor) or not isinstance(value, DTensor):
        return isinstance(parameter, DTensor) == isinstance(value, DTensor)
    return value.device_mesh == parameter.device_mesh and value.placements == parameter.placements


@contextmanager
def _on_shards(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give an optimizer plain shards, with their gradients and state; put its DTensors back afterwards."""
    own_state, own_params = optimizer.state, [group["params"] for group in optimizer.param_groups]
    with torch.no_grad():  # otherwise each `to_local` records an autograd function
        shards = {parameter: _shard(parameter) for params in own_params for parameter in params}
        shown = {
            shards[parameter]: {name: local_part(value) for name, value in own_state[parameter].items()}
            for parameter in shards
            if own_state.get(parameter)
        }
    state = defaultdict(dict, {shard: dict(values) for shard, values in shown.items()})
    updated = [parameter for parameter in shards if parameter.grad is not None]
    try:
        optimizer.state = state
        for group, params in zip(optimizer.param_groups, own_params, strict=True):
            group["params"] = [shards[parameter] for parameter in params]
        yield
    finally:
        optimizer.state = own_state
        for group, params in zip(optimizer.param_groups, own_params, strict=True):
            group["params"] = params
        # As an update of the DTensors does: autograd and caches keyed by the version then detect the change.
        torch.autograd.graph.increment_version(updated)
    for shard, values in state.items():
        made = [name for name, value in values.items() if value is not shown.get(shard, {}).get(name)]
        if made:
            raise AssertionError(f"expected {type(optimizer).__name__} to change its state in place, got new {made}")


def _shard(parameter: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor of a parameter's memory, with its gradient."""
    shard = local_part(parameter).detach()
    if parameter.grad is not None:
        shard.grad = local_part(parameter.grad)
    return shard

"""The optimizer's update of this rank's shards, without a dispatch of DTensors for each of its operations.

[Note: The same bits, sooner]
AdamW on DTensors runs about a dozen operations per parameter, and each is dispatched twice: by DTensor, in Python, and
on the shard. An update that treats every element alone does to the shards what it does to the whole, so its optimizer
is shown the shards as plain tensors while it steps. It holds its own parameters and DTensor state before and after.
Not others: the update of one element may need a norm, or a factor, of the whole parameter.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zeroamp.hooks import has_step_hooks, is_scheduled_step

ELEMENTWISE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers whose update treats every element alone and whose state has a parameter's shape or one element. Not their
subclasses, whose update may be another."""


def step(optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.step()`, on shards where that is the same: see [Note: The same bits, sooner]."""
    if not works_on_shards(optimizer):
        optimizer.step()
        return
    with _on_shards(optimizer):
        optimizer.step()


def works_on_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` shows an optimizer plain shards.

    Not one that somebody else sees at work: by a hook on its step, or by a step of his own (a compiled one, say).
    """
    own_step = vars(optimizer).get("step")  # torch's schedulers put one there, which counts and calls the optimizer's
    return (
        type(optimizer) in ELEMENTWISE
        and (own_step is None or is_scheduled_step(own_step))
        and not has_step_hooks(optimizer)
        and not any(group["differentiable"] for group in optimizer.param_groups)
        and all(_is_like(parameter, value) for parameter, value in _state_tensors(optimizer))
    )


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for parameter, state in optimizer.state.items():
        yield from ((parameter, value) for value in state.values() if isinstance(value, torch.Tensor))


def _is_like(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a value of the state is sharded as its parameter is, or is one plain element (the count of steps)."""
    if not isinstance(parameter, DTensor):
        return not isinstance(value, DTensor)
    if not isinstance(value, DTensor):
        return value.dim() == 0
    return value.device_mesh == parameter.device_mesh and value.placements == parameter.placements


@contextmanager
def _on_shards(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Show an optimizer plain shards, and gradients and state as of them; put back its own afterwards."""
    own_state, own_params = optimizer.state, [group["params"] for group in optimizer.param_groups]
    with torch.no_grad():  # else each `to_local` is an autograd function
        shards = {parameter: _shard(parameter) for params in own_params for parameter in params}
        shown = {
            parameter: {name: _local(value) for name, value in own_state[parameter].items()}
            for parameter in shards
            if parameter in own_state
        }
    optimizer.state = defaultdict(dict, {shards[parameter]: dict(state) for parameter, state in shown.items()})
    for group, params in zip(optimizer.param_groups, own_params, strict=True):
        group["params"] = [shards[parameter] for parameter in params]
    try:
        yield
    finally:
        new_state, optimizer.state = optimizer.state, own_state
        for group, params in zip(optimizer.param_groups, own_params, strict=True):
            group["params"] = params
        for parameter, shard in shards.items():
            before = shown.get(parameter, {})
            for name, value in new_state.get(shard, {}).items():
                if name not in before or value is not before[name]:  # else it was changed in place
                    own_state[parameter][name] = _like(parameter, value)


def _shard(parameter: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor of a parameter's memory, with its gradient."""
    shard: torch.Tensor = _local(parameter).detach()
    if parameter.grad is not None:
        shard.grad = _local(parameter.grad)
    return shard


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _like(parameter: torch.Tensor, value: Any) -> Any:
    """Return a value that an update made for a shard, sharded as the parameter is unless it is one element."""
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )

"""The optimizer's part of a DeepSpeed checkpoint: per-parameter tensors, numbers of steps, param groups."""

from dataclasses import dataclass
from typing import Any

import torch

from zeroamp.deepspeed.files import CONVERT, Entries
from zeroamp.deepspeed.layout import PlacedParameter, StoredTensor
from zeroamp.policies.errors import CheckpointError, describe


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """What the optimizer keeps, by parameter."""

    tensors: dict[str, dict[str, StoredTensor]]
    """Parameter name -> state key, such as "exp_avg" -> tensor. No entry before the first step."""
    steps: dict[str, float]
    """Parameter name -> steps that its state has seen."""
    group_of: dict[str, int]
    """Parameter name -> param group."""
    param_groups: list[dict[str, Any]] | None
    """Hyperparameters; None where the checkpoint has none (`elastic_checkpoint`)."""


def read_moments(optimizers: list[Entries], placed: dict[str, PlacedParameter], stage: int) -> Moments:
    """Read the base optimizer's state of all ranks.

    Raises:
        CheckpointError: it is not the state of one tensor per flat vector that every optimizer of DeepSpeed has.
    """
    ranks = [_base_state(optimizer, stage) for optimizer in optimizers]
    groups = ranks[0][1]
    group_of_flat = [g for g, group in enumerate(groups or []) for _ in group["params"]]
    num_flats = 1 + max((parameter.group for parameter in placed.values()), default=-1)
    if groups is not None and len(group_of_flat) != num_flats:
        found = f"{len(group_of_flat)} tensors in the param groups"
        raise CheckpointError(describe(optimizers[0].file, found, f"{num_flats}, one per flat vector", CONVERT))
    tensors: dict[str, dict[str, StoredTensor]] = {}
    steps: dict[str, float] = {}
    for name, parameter in placed.items():
        states = [states.get(parameter.group, {}) for states, _ in ranks]
        group = groups[group_of_flat[parameter.group]] if groups is not None else {}
        keys = _tensor_keys(states[0])
        if keys:
            tensors[name] = {key: _take(optimizers, states, parameter, key) for key in keys}
            steps[name] = _step(optimizers[0], states[0], group)
    return Moments(
        tensors=tensors,
        steps=steps,
        group_of={name: group_of_flat[p.group] if groups is not None else p.group for name, p in placed.items()},
        param_groups=groups,
    )


def _base_state(optimizer: Entries, stage: int) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]] | None]:
    """Return state by flat vector, and the param groups: as `torch.optim.Optimizer.state_dict`, or a list of states."""
    key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    if isinstance(optimizer.values.get(key), list):
        return dict(enumerate(optimizer.each(key, dict))), None
    base = optimizer.inside(key)
    states, groups = base.inside("state"), base.each("param_groups", dict)
    for group in groups:
        Entries(f"{base.file}: param_groups", group).get("params", list)
    return {index: states.inside(index).values for index in states.values}, groups


def _tensor_keys(state: dict[str, Any]) -> list[str]:
    return [key for key, value in state.items() if isinstance(value, torch.Tensor) and value.ndim == 1]


def _take(
    optimizers: list[Entries], states: list[dict[str, Any]], parameter: PlacedParameter, key: str
) -> StoredTensor:
    flats = []
    for rank, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
        flat = state.get(key)
        needed = max((p.start + p.end - p.begin for p in parameter.places if p.rank == rank), default=0)
        if not isinstance(flat, torch.Tensor) or flat.ndim != 1 or flat.numel() < needed:
            found = f"{flat.numel()} elements" if isinstance(flat, torch.Tensor) else "none"
            raise CheckpointError(
                describe(f"{optimizer.file}: {key}", found, f"{needed} or more, as long as the weights", CONVERT)
            )
        flats.append(flat)
    return parameter.take(flats)


def _step(optimizer: Entries, state: dict[str, Any], group: dict[str, Any]) -> float:
    """Return the number of steps: in the state, or with DeepSpeed's older FusedAdam in the param group."""
    step = state.get("step", group.get("step", optimizer.values.get("base_optimizer_state_step")))
    if not isinstance(step, (int, float, torch.Tensor)) or (isinstance(step, torch.Tensor) and step.numel() != 1):
        raise CheckpointError(describe(f"{optimizer.file}: step", repr(step)[:80], "a number", CONVERT))
    return float(step)

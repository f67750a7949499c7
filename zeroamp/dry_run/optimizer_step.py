"""Measures the optimizer's state, and what its update allocates, by one step on fake shards."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from zeroamp.dry_run.traced_micro_batch import Change, EventRecorder
from zeroamp.hooks._torch.dispatch import FakeTensorMode
from zeroamp.hooks.random_state import preserved_random_state
from zeroamp.hooks.tensors import tensors_in
from zeroamp.host_memory.between_steps import limited_to, parts_of
from zeroamp.optimizers.bf16_states import example_optimizer
from zeroamp.optimizers.from_config import optimizer_from_config
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.planning.shard_sizes import local_numel

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class PartCosts:
    """Bytes of the parameters that are updated together: see [Note: An update in parts] in `between_steps.py`."""

    state_bytes: int
    """State between steps, step counters included."""
    changes: tuple[int, ...]
    """Bytes that the update allocates (above 0) and frees (below 0), in order."""


def optimizer_costs(
    plan: Plan, ranks: Ranks, factory: OptimizerFactory | None, *, foreach: bool | None = None
) -> list[PartCosts]:
    """Return the costs of each part of the optimizer's second step on fake shards, on the first rank.

    The first rank holds the most. The first step creates the state. Param groups that do not set `foreach` get the
    given value: torch's default on accelerators is True, which copies tensors. Without a factory the optimizer is the
    config's, else `torch.optim.AdamW`.
    """
    with preserved_random_state("cpu"), torch.inference_mode(False), FakeTensorMode():
        shards = []
        for param in (each for each in plan.params if each.is_trainable):
            num_shards = ranks.of(is_expert=param.is_expert).shards(plan.policy) or 1
            shards.append(nn.Parameter(torch.empty(local_numel(param, num_shards), dtype=param.dtypes.stored)))
        if not shards:
            return []
        if factory is None and plan.policy.optimizer is not None:
            optimizer = optimizer_from_config(plan.policy, shards)
        else:
            optimizer = factory(shards) if factory else example_optimizer(plan.policy, shards)
        for group in optimizer.param_groups:
            if foreach is not None and group.get("foreach", ...) is None and not group.get("fused"):
                group["foreach"] = foreach
        for shard in shards:
            shard.grad = torch.empty_like(shard)
        optimizer.step()
        existing = [*tensors_in(optimizer.state), *shards, *(each.grad for each in shards if each.grad is not None)]
        parts = parts_of(optimizer) if plan.policy.offload_between_steps else [list[torch.Tensor](shards)]
        costs = []
        for part in parts:
            with limited_to(optimizer, part), EventRecorder(existing) as recorder:
                optimizer.step()
            state = tensors_in([optimizer.state[each] for each in part])
            changes = (event.num_bytes for event in recorder.events if isinstance(event, Change))
            costs.append(PartCosts(sum(tensor.nbytes for tensor in state), tuple(changes)))
    return costs

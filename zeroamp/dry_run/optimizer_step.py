"""Measures the optimizer's state, and what its update allocates, by one step on fake shards."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from zeroamp.dry_run.traced_micro_batch import Change, EventRecorder
from zeroamp.hooks._torch.dispatch import FakeTensorMode
from zeroamp.hooks.random_state import preserved_random_state
from zeroamp.hooks.tensors import tensors_in
from zeroamp.optimizers.bf16_states import example_optimizer
from zeroamp.optimizers.from_config import optimizer_from_config
from zeroamp.planning.groups import ParamPlan
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.planning.shard_sizes import local_numel

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class OptimizerCosts:
    """Bytes that the optimizer takes on the first rank, which holds the most."""

    state_bytes: int
    """State between steps, step counters included."""
    changes: tuple[int, ...]
    """Bytes that a step allocates (above 0) and frees (below 0), in order."""


def optimizer_costs(
    plan: Plan, ranks: Ranks, factory: OptimizerFactory | None, *, foreach: bool | None = None
) -> OptimizerCosts:
    """Return the costs of the optimizer's second step on fake shards. The first step creates its state.

    Args:
        plan: of the model.
        ranks: of the mesh.
        factory: parameters -> their optimizer. None: the config's optimizer, else `torch.optim.AdamW`.
        foreach: value for param groups that do not set `foreach`. torch's default on accelerators is True, which copies
            tensors. None: torch's choice.
    """
    with preserved_random_state("cpu"), torch.inference_mode(False), FakeTensorMode():
        shards = [
            nn.Parameter(torch.empty(local_numel(param, _shards(param, plan, ranks)), dtype=param.dtypes.stored))
            for param in plan.params
            if param.is_trainable
        ]
        if not shards:
            return OptimizerCosts(0, ())
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
        state = list(tensors_in(optimizer.state))
        recorder = EventRecorder([*state, *shards, *(shard.grad for shard in shards if shard.grad is not None)])
        with recorder:
            optimizer.step()
    changes = tuple(event.num_bytes for event in recorder.events if isinstance(event, Change))
    return OptimizerCosts(sum(tensor.nbytes for tensor in state), changes)


def _shards(param: ParamPlan, plan: Plan, ranks: Ranks) -> int:
    return ranks.of(is_expert=param.is_expert).shards(plan.policy) or 1

"""Calls `optimizer.step` on this rank's shards, without DTensor's dispatch of every operation.

[Note: Update on shards]
AdamW on DTensors runs about a dozen operations per parameter, and each is dispatched twice: by DTensor, in Python, and
on the shard. An element-wise update gives the same bits on the shards as on the whole parameter. So `step` replaces the
DTensors of such an optimizer by their plain shards, and puts the DTensors back afterwards.
Only element-wise optimizers qualify: LAMB and Adafactor need statistics of the whole parameter. If every rank holds
whole parameters, LAMB and Adafactor qualify too. `zeroamp.training.optimizer_kinds` decides.

State that an optimizer creates for a shard becomes a DTensor that is sharded like the parameter, so that checkpoints
can reshard it. State stays in plain tensors if it cannot be resharded: 8-bit values whose scales belong to blocks of
this rank's shard, and statistics of another shape. See `PreparedShards`.

[Note: A guarded update]
The sums over ranks decide whether the update is skipped: because a gradient is not finite, or a rank failed. Fused
Adam, AdamW and SGD read this decision on the device as `found_inf`, which `torch.amp.GradScaler` uses too. If it is 1,
they leave parameters and state as they are, and set Adam's step count back by one. So the host launches the update
before it has read the sums, and reads them while the device works.

The optimizer's state must exist before a guarded update: a skipped step must not create state, and fused SGD would
create momentum without values. So the first update of a parameter is not guarded, except by SGD without momentum,
which has no state. With `grad_scale` the kernels divide gradients by the loss scale. If the scale is a power of two,
the quotient has the bits of the product that other paths compute. TrainStep passes no other scale.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.optimizer import guarded, has_own_step, has_step_hooks, takes_found_inf
from zeroamp.planning.mesh import num_shards_of
from zeroamp.policies.extensions import load
from zeroamp.training.optimizer_kinds import is_guarded_by_the_device, kind_of
from zeroamp.training.prepared_shards import PreparedShards, is_sharded_like
from zeroamp.wrapping.state import WrapState


class OptimizerUpdate:
    """Calls `step` of one optimizer, on plain shards if that gives the same bits: see [Note: Update on shards]."""

    def __init__(self, optimizer: torch.optim.Optimizer, state: WrapState, *, on_shards: bool = False) -> None:
        """Store the arguments. Shards are prepared by the first `prepare` or `step`.

        Args:
            optimizer: holds parameters of a wrapped model.
            state: the `WrapState` of that model.
            on_shards: whether the caller states that the optimizer is element-wise.
        """
        self.optimizer = optimizer
        self._state = state
        self._on_shards = on_shards
        self._shards: PreparedShards | None = None

    def prepare(self) -> None:
        """Prepare the shards and give them their gradients, if the optimizer works on shards.

        `step` does this too, if `prepare` was not called. Called before the step's all-reduce, `prepare` adds no time
        on an accelerator: the device still runs the backward.
        """
        shards = None if self._on_shards or not _may_work_on_shards(self.optimizer) else self._shards
        if shards is not None and shards.is_current() and shards.take_gradients():
            return
        self.drop()
        self._shards = None
        if works_on_shards(self.optimizer, on_shards=self._on_shards):
            if self._on_shards:
                load("TrainStep.resolve_overrides")(self.optimizer)
            self._shards = PreparedShards(self.optimizer, as_parameters=self._on_shards)
            self._shards.take_gradients()

    def can_be_guarded(self, device: torch.device) -> bool:
        """Return whether `step` accepts a `found_inf` on `device`. Call `prepare` before.

        See [Note: A guarded update].
        """
        if self._shards is None or not is_guarded_by_the_device(self.optimizer, on_shards=self._on_shards):
            return False
        is_plain_sgd = isinstance(self.optimizer, torch.optim.SGD) and not any(
            group["momentum"] for group in self.optimizer.param_groups
        )
        return takes_found_inf(self.optimizer) and self._shards.are_on(device, with_state=not is_plain_sgd)

    def drop(self) -> None:
        """Release the gradients. With `on_shards`, also release the shards, which each step prepares again."""
        if self._shards is not None:
            self._shards.drop_gradients()
        if self._on_shards:  # prepared in each step
            self._shards = None

    def step(
        self,
        found_inf: torch.Tensor | None = None,
        grad_scale: torch.Tensor | None = None,
        *,
        is_prepared: bool = False,
    ) -> None:
        """Call `optimizer.step()`.

        Args:
            found_inf: 0-D fp32 on the device: 1 to leave parameters and state as they are, else 0. Pass it only if
                `can_be_guarded` returned True.
            grad_scale: 0-D fp32 on the device, a power of two by which gradients are divided. Only with `found_inf`.
            is_prepared: whether only gradients have changed since `prepare`.
        """
        if not is_prepared:
            self.drop()  # the caller may have changed gradients: take them again
        if self._shards is None or not is_prepared or not self._shards.take_gradients():
            self.prepare()
        if self._shards is not None:
            guard = nullcontext() if found_inf is None else guarded(self.optimizer, found_inf, grad_scale)
            with self._shards.shown(), guard:
                self.optimizer.step()
        elif kind_of(self.optimizer, on_shards=self._on_shards) == "muon":
            with load("torch.optim.Muon")(self._state, self.optimizer):
                self.optimizer.step()
        else:
            with _replicated_apart(self.optimizer):
                self.optimizer.step()


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


def works_on_shards(optimizer: torch.optim.Optimizer, *, on_shards: bool = False) -> bool:
    """Return whether `step` would run on plain shards, with the optimizer's present gradients and state.

    Optimizers with step hooks, or with a `step` of the instance (a compiled one, say), run on DTensors, unless the
    caller states that they are element-wise.
    """
    if on_shards:
        return True
    return _may_work_on_shards(optimizer) and all(
        _is_usable(parameter, parameter.grad, optimizer.state.get(parameter, {}))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )


def _may_work_on_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `works_on_shards` is true if gradients and state are sharded like the parameters."""
    return (
        kind_of(optimizer, on_shards=False) == "shards"
        and not has_own_step(optimizer)
        and not has_step_hooks(optimizer)
        and not any(group.get("differentiable") for group in optimizer.param_groups)
    )


def _is_usable(parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> bool:
    """Return whether a parameter's gradient and state allow an update on plain shards.

    The gradient must have the parameter's dtype and sharding. State tensors must be sharded like the parameter, or be
    plain and 0-D. If this rank holds the whole parameter, plain state of other shapes is allowed too.
    """
    if grad.dtype != parameter.dtype or isinstance(grad, DTensor) != isinstance(parameter, DTensor):
        return False
    if not isinstance(parameter, DTensor):
        return not any(isinstance(value, DTensor) for value in state.values())
    for value in (grad, *state.values()):
        if isinstance(value, DTensor):
            if not is_sharded_like(value, parameter):
                return False
        elif isinstance(value, torch.Tensor) and value.dim() > 0 and num_shards_of(parameter) > 1:
            return False
    return True

"""Calls `optimizer.step` on this rank's shards, without DTensor's dispatch of every operation.

[Note: Update on shards]
AdamW on DTensors runs about a dozen operations per parameter, and each is dispatched twice: by DTensor, in Python, and
on the shard. An element-wise update gives the same bits on the shards as on the whole parameter. So `step` replaces the
DTensors of such an optimizer by their plain shards, and puts the DTensors back afterwards.
Only element-wise optimizers qualify: LAMB and Adafactor need statistics of the whole parameter. If every rank holds
whole parameters, LAMB and Adafactor qualify too. `kind_of` decides.

State that an optimizer creates for a shard becomes a DTensor that is sharded like the parameter, so that checkpoints
can reshard it. State stays in plain tensors if it cannot be resharded: 8-bit values whose scales belong to blocks of
this rank's shard, and statistics of another shape. See `_Shard.store`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.dtensor import local_parts
from zeroamp.planning.mesh import local_part, num_shards_of, sharded_like
from zeroamp.wrapping.optimizer_hooks import ELEMENTWISE, Kind, OwnedOptimizers, has_own_step, has_step_hooks
from zeroamp.wrapping.state import WrapState


def kind_of(optimizer: torch.optim.Optimizer, *, on_shards: bool) -> Kind:
    """Return how an optimizer is updated. `on_shards`: the caller states that the optimizer is element-wise."""
    if on_shards or type(optimizer) in ELEMENTWISE:
        return "shards"
    from zeroamp.optimizers.kinds import kind_of_other

    return kind_of_other(optimizer)


class OptimizerUpdate:
    """Calls `step` of one optimizer, on plain shards if that gives the same bits: see [Note: Update on shards]."""

    def __init__(self, optimizer: torch.optim.Optimizer, state: WrapState, *, on_shards: bool = False) -> None:
        """Store the arguments.

        Args:
            optimizer: holds parameters of a wrapped model.
            state: the `WrapState` of that model.
            on_shards: whether the caller states that the optimizer is element-wise.
        """
        self.optimizer = optimizer
        OwnedOptimizers.add(optimizer)
        self._state = state
        self._on_shards = on_shards
        self.parts: Callable[[], Iterable[AbstractContextManager[None]]] = lambda: (nullcontext(),)
        """Returns contexts. `step` calls `optimizer.step()` in each of them, by default once."""

    def step(self) -> None:
        """Call `optimizer.step()`, once for each of `parts`."""
        with OwnedOptimizers.updating():
            for part in self.parts():
                with part:
                    self._step()

    def _step(self) -> None:
        if works_on_shards(self.optimizer, on_shards=self._on_shards):
            if self._on_shards:
                from zeroamp.optimizers.kinds import resolve_overrides

                resolve_overrides(self.optimizer)
            with _plain_shards(self.optimizer, as_parameters=self._on_shards):
                self.optimizer.step()
        elif kind_of(self.optimizer, on_shards=self._on_shards) == "muon":
            from zeroamp.optimizers.muon import updating_matrices

            with updating_matrices(self._state, self.optimizer):
                self.optimizer.step()
        else:
            from zeroamp.optimizers.kinds import replicated_apart

            with replicated_apart(self.optimizer):
                self.optimizer.step()


@contextmanager
def _plain_shards(optimizer: torch.optim.Optimizer, *, as_parameters: bool) -> Iterator[None]:
    """Give the optimizer the shards of its DTensors inside the context. Then restore these, and store its new state.

    `as_parameters`: give the optimizer an `nn.Parameter` per shard. Optimizers of other libraries may need one. torch's
    own do not, and building one takes time.
    """
    own_state, own_params = optimizer.state, [group["params"] for group in optimizer.param_groups]
    shards = _shards_of([each for params in own_params for each in params], own_state, as_parameters)
    state: defaultdict[Any, Any] = defaultdict(dict)
    state.update({key: values for key, values in own_state.items() if id(key) not in shards})
    state.update({each.shard: dict(each.state) for each in shards.values() if each.state})
    try:
        optimizer.state = state
        for group, params in zip(optimizer.param_groups, own_params, strict=True):
            group["params"] = [shards[id(each)].shard for each in params]
        yield
    finally:
        optimizer.state = own_state
        for group, params in zip(optimizer.param_groups, own_params, strict=True):
            group["params"] = params
        for each in shards.values():
            if each.shard is not each.parameter:
                each.shard.grad = None
        # An update of the DTensors does this too: autograd, and caches keyed by the version, detect the change.
        updated = [each.parameter for each in shards.values() if each.parameter.grad is not None]
        torch.autograd.graph.increment_version(updated)
    with torch.no_grad():
        for each in shards.values():
            if as_parameters:
                each.copy_back()
            left = state.pop(each.shard, {})
            if left.keys() != each.state.keys() or not all(map(is_, left.values(), each.state.values())):
                each.store(left, own_state)  # otherwise the optimizer has changed its state in place
    own_state.update(state)


@torch.no_grad()  # otherwise an `nn.Parameter` of a shard records an autograd function
def _shards_of(
    parameters: Sequence[torch.Tensor], state: Mapping[torch.Tensor, dict[str, Any]], as_parameters: bool
) -> "dict[int, _Shard]":
    """Return {id of a parameter: its shard}."""
    tensors = [(each, each.grad, *state.get(each, {}).values()) for each in parameters]
    local = iter(local_parts([each for of_parameter in tensors for each in of_parameter]))
    return {
        id(parameter): _Shard(parameter, state.get(parameter, {}), list(islice(local, len(own))), as_parameters)
        for parameter, own in zip(parameters, tensors, strict=True)
    }


class _Shard:
    """One parameter, and the plain shard of it that an optimizer gets.

    Kernels of other libraries may not accept tensors without elements. So a rank whose shard has no elements gives the
    optimizer a row of zeros in its place, and the optimizer makes state for that row.
    """

    __slots__ = ("_is_empty", "_shape", "parameter", "shard", "state")

    def __init__(
        self, parameter: torch.Tensor, state: dict[str, Any], local_tensors: list[Any], as_parameter: bool
    ) -> None:
        """`local_tensors`: the local parts of the parameter, its gradient and the values of its state."""
        self.parameter = parameter
        local, grad, *values = local_tensors
        self._shape = local.shape
        self._is_empty = local.numel() == 0 and num_shards_of(parameter) > 1
        if self._is_empty:
            local, grad = _row(local), None if grad is None else _row(grad)
            whole = zip(state.values(), values, strict=True)
            values = [_row(value) if isinstance(own, DTensor) else value for own, value in whole]
        self.shard = nn.Parameter(local, requires_grad=parameter.requires_grad) if as_parameter else local
        """A plain tensor in the parameter's memory, whose `grad` is the shard of the parameter's gradient."""
        if self.shard is not parameter and grad is not None:
            self.shard.grad = grad
        self.state = dict(zip(state, values, strict=True))
        """The parameter's state with plain shards, as the optimizer gets it."""

    def copy_back(self) -> None:
        """Copy the shard to the parameter's memory if the optimizer assigned `parameter.data`."""
        memory = local_part(self.parameter)
        if not self._is_empty and self.shard.data_ptr() != memory.data_ptr():
            memory.copy_(self.shard)

    def store(self, state: dict[str, Any], own_state: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Store the state that the optimizer left for the parameter.

        Tensors of the shard's shape become DTensors. If one tensor of at least one dimension has another shape, or is
        an integer tensor, all tensors stay plain: they are quantized values, or statistics of this rank's shard, and
        belong together.
        """
        own = own_state.setdefault(self.parameter, {})
        for name in own.keys() - state.keys():
            del own[name]
        is_elementwise = all(self._is_elementwise(value) for value in state.values())
        for name, value in state.items():
            if name not in own or value is not self.state[name]:
                own[name] = self._sharded(value) if is_elementwise and self._has_shape(value) else value

    def _is_elementwise(self, value: object) -> bool:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return True
        return self._has_shape(value) and (value.is_floating_point() or value.dtype == torch.bool)

    def _has_shape(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == self.shard.shape

    def _sharded(self, value: torch.Tensor) -> torch.Tensor:
        like = self.parameter
        if not isinstance(like, DTensor):
            return value
        if self._is_empty:
            value = value.new_empty(self._shape)
        return sharded_like(value, like)


def _row(shard: torch.Tensor) -> torch.Tensor:
    """Return a row of zeros in place of a shard without elements."""
    return shard.new_zeros([length or 1 for length in shard.shape])


def works_on_shards(optimizer: torch.optim.Optimizer, *, on_shards: bool = False) -> bool:
    """Return whether `step` would run on plain shards, with the optimizer's present gradients and state.

    Optimizers with step hooks, or with a `step` of the instance (a compiled one, say), run on DTensors, unless the
    caller states that they are element-wise.
    """
    if on_shards:
        return True
    if kind_of(optimizer, on_shards=False) != "shards" or has_own_step(optimizer) or has_step_hooks(optimizer):
        return False
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return False
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is not None and not _is_usable(parameter, grad, optimizer.state.get(parameter, {})):
                return False
    return True


def _is_usable(parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> bool:
    """Return whether a parameter's gradient and state allow an update on plain shards.

    The gradient must have the parameter's dtype and sharding. State tensors must be sharded like the parameter, or be
    plain and 0-D. If this rank holds the whole parameter, plain state of other shapes is allowed too.
    """
    if grad.dtype != parameter.dtype or isinstance(grad, DTensor) != isinstance(parameter, DTensor):
        return False
    if not isinstance(parameter, DTensor):
        return not any(isinstance(value, DTensor) for value in state.values())
    mesh, placements = parameter.device_mesh, parameter.placements
    for value in (grad, *state.values()):
        if isinstance(value, DTensor):
            # By identity first, because comparing two meshes by value takes longer than everything else here.
            if (value.device_mesh is not mesh and value.device_mesh != mesh) or value.placements != placements:
                return False
        elif isinstance(value, torch.Tensor) and value.dim() > 0 and num_shards_of(parameter) > 1:
            return False
    return True

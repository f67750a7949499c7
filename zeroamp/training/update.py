"""The optimizer's update of this rank's shards, without a dispatch of DTensors for each of its operations.

[Note: The same bits, sooner]
AdamW on DTensors runs about a dozen operations per parameter, and each is dispatched twice: by DTensor, in Python, and
on the shard. An element-wise update gives the same bits on the shards as on the whole parameter. So `step` replaces the
DTensors of such an optimizer by their plain shards, and puts the DTensors back afterwards.
Only element-wise optimizers qualify: LAMB and Adafactor need statistics of the whole parameter. Where one rank holds
the whole parameter, those qualify too. `zeroamp.training.optimizer_kinds` decides.

State that an optimizer makes for a shard becomes a DTensor that is sharded like the parameter, so that checkpoints can
reshard it. State is left as plain tensors where that would be wrong: 8-bit values whose scales belong to blocks of this
rank's shard, and statistics of another shape. See `_Shown.keep`.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.optimizer import has_own_step, has_step_hooks, muon_updated_by
from zeroamp.planning.mesh import local_part, num_shards_of
from zeroamp.training.muon import ShardedMuon
from zeroamp.training.optimizer_kinds import kind_of, resolve_overrides
from zeroamp.wrapping.state import WrapState


def step(optimizer: torch.optim.Optimizer, state: WrapState, *, on_shards: bool = False) -> None:
    """Call `optimizer.step()`, on plain shards if that gives the same bits: see [Note: The same bits, sooner].

    Args:
        optimizer: of parameters of a wrapped model.
        state: of that model.
        on_shards: whether the caller states that the optimizer is element-wise.
    """
    if works_on_shards(optimizer, on_shards=on_shards):
        resolve_overrides(optimizer)
        with _on_shards(optimizer, as_parameters=on_shards):
            optimizer.step()
    elif kind_of(optimizer, on_shards=on_shards) == "muon":
        with muon_updated_by(ShardedMuon(state)):
            optimizer.step()
    else:
        with _replicated_apart(optimizer):
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


def works_on_shards(optimizer: torch.optim.Optimizer, *, on_shards: bool = False) -> bool:
    """Return whether `step` would run on plain shards, with the gradients and the state that the optimizer has now.

    Optimizers with step hooks, or with a `step` of the instance (a compiled one, say), run on DTensors, unless the
    caller states that they are element-wise.
    """
    if on_shards:
        return True
    return (
        kind_of(optimizer, on_shards=False) == "shards"
        and not has_own_step(optimizer)
        and not has_step_hooks(optimizer)
        and all(_is_ready(group, optimizer.state) for group in optimizer.param_groups)
    )


def _is_ready(group: dict[str, Any], states: dict[torch.Tensor, dict[str, Any]]) -> bool:
    return not group.get("differentiable") and all(
        _is_usable(parameter, parameter.grad, states.get(parameter, {}))
        for parameter in group["params"]
        if parameter.grad is not None
    )


def _is_usable(parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any]) -> bool:
    """Whether each value of a parameter's state is sharded like it, is a plain 0-D tensor, or no tensor.

    The gradient must be sharded like the parameter, with its dtype. Where this rank holds the whole parameter, plain
    tensors of other shapes are usable too.
    """
    if grad.dtype != parameter.dtype or isinstance(grad, DTensor) != isinstance(parameter, DTensor):
        return False
    if not isinstance(parameter, DTensor):
        return not any(isinstance(value, DTensor) for value in state.values())
    mesh, placements = parameter.device_mesh, parameter.placements
    for value in (grad, *state.values()):
        if isinstance(value, DTensor):
            own = value.device_mesh  # first by identity: an equality of meshes costs more than all else here
            if (own is not mesh and own != mesh) or value.placements != placements:
                return False
        elif isinstance(value, torch.Tensor) and value.dim() > 0 and num_shards_of(parameter) > 1:
            return False
    return True


@contextmanager
def _on_shards(optimizer: torch.optim.Optimizer, *, as_parameters: bool) -> Iterator[None]:
    """Give an optimizer plain shards, with their gradients and state; put its DTensors back afterwards.

    Optimizers of other libraries may need an `nn.Parameter`. torch's own do not, and to build one takes time.
    """
    own_state, own_params = optimizer.state, [group["params"] for group in optimizer.param_groups]
    with torch.no_grad():  # otherwise each `to_local` records an autograd function
        shown = [_Shown(each, own_state.get(each), as_parameters) for params in own_params for each in params]
    held = {id(each.parameter): each for each in shown}  # by identity: hashing a tensor is a call of Python
    state = defaultdict(dict, {key: values for key, values in own_state.items() if id(key) not in held})
    state.update((each.shard, dict(each.state)) for each in shown if each.state)
    updated = [each.parameter for each in shown if each.parameter.grad is not None]
    try:
        optimizer.state = state
        for group, params in zip(optimizer.param_groups, own_params, strict=True):
            group["params"] = [held[id(parameter)].shard for parameter in params]
        yield
    finally:
        optimizer.state = own_state
        for group, params in zip(optimizer.param_groups, own_params, strict=True):
            group["params"] = params
        # As an update of the DTensors does: autograd and caches keyed by the version then detect the change.
        torch.autograd.graph.increment_version(updated)
    with torch.no_grad():
        for each in shown:
            each.keep(state.get(each.shard, {}), own_state)
    own_shards = {id(each.shard) for each in shown}
    own_state.update({key: values for key, values in state.items() if id(key) not in own_shards})


class _Shown:
    """One parameter whose shard an optimizer gets.

    Kernels of other libraries need not take tensors without elements. So a rank whose shard has none shows a row of
    zeros in its place, and its state is made for that row.
    """

    __slots__ = ("_is_empty", "_memory", "parameter", "shard", "state")

    def __init__(self, parameter: torch.Tensor, state: dict[str, Any] | None, as_parameter: bool) -> None:
        self.parameter = parameter
        self._memory = local_part(parameter)
        self._is_empty = self._memory.numel() == 0 and num_shards_of(parameter) > 1
        shown = self._filled if self._is_empty else local_part
        shard = shown(self._memory)
        self.shard = nn.Parameter(shard, requires_grad=parameter.requires_grad) if as_parameter else shard.detach()
        """A plain tensor of the parameter's memory, with its gradient."""
        if parameter.grad is not None:
            self.shard.grad = shown(parameter.grad)
        self.state = {
            name: shown(value) if isinstance(value, DTensor) else value for name, value in (state or {}).items()
        }
        """As the optimizer gets it."""

    @staticmethod
    def _filled(tensor: torch.Tensor) -> torch.Tensor:
        """Return a row of zeros in place of a shard without elements."""
        local = local_part(tensor)
        return local.new_zeros([length or 1 for length in local.shape])

    def keep(self, state: dict[str, Any], own_state: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Store what the optimizer left as the parameter's state.

        Tensors of the shard's shape become DTensors. If there is another one of at least one dimension, or an integer
        one, all stay plain: they are quantized, or statistics of this rank's shard, and belong together.
        """
        if not self._is_empty and self.shard.data_ptr() != self._memory.data_ptr():
            self._memory.copy_(self.shard)  # the optimizer assigned `parameter.data`
        if state.keys() == self.state.keys() and all(map(is_, state.values(), self.state.values())):
            return  # all was changed in place
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
            value = value.new_empty(self._memory.shape)
        return DTensor.from_local(
            value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

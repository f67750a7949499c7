"""`PreparedShards`: the plain shards that an optimizer updates in place of its DTensors.

[Note: Prepared once]
An optimizer gets a tensor, a gradient and a dict of state for each shard. All but the gradient are the same in every
step, so they are prepared once. Each step compares objects by identity: the parameters and their memory, the param
groups, the optimizer's state. If one of them is another object (after loading, `add_param_group` or another layout),
the shards are prepared again. After the step, state is stored only if the optimizer replaced an object.

[Note: No memory held]
Between steps a caller may move parameters or state elsewhere, to free their memory. The prepared shards share it. So
they hold weak references to the caller's tensors: when one of these tensors is freed, all prepared shards are released.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, compress
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.dtensor import layouts, local_tensors
from zeroamp.planning.mesh import local_part, num_shards_of


class PreparedShards:
    """Plain shards of the parameters of one optimizer, with gradients and state in the memory of its DTensors."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, as_parameters: bool = False) -> None:
        """Prepare the shards, without gradients.

        Args:
            optimizer: of parameters of a wrapped model.
            as_parameters: give the optimizer an `nn.Parameter` per shard. Optimizers of other libraries may need one.
                torch's own do not, and building one takes time.
        """
        self._optimizer = optimizer
        self._as_parameters = as_parameters
        own_state = optimizer.state
        params = [list(group["params"]) for group in optimizer.param_groups]
        with torch.no_grad():  # otherwise each `to_local` records an autograd function
            shown = [_Shown(each, own_state.get(each), as_parameters) for each in chain.from_iterable(params)]
        self._shown = shown
        self._parameters = [each.parameter for each in shown]
        self._sharded = [each for each in shown if isinstance(each.parameter, DTensor)]
        self._plain = [each for each in shown if not isinstance(each.parameter, DTensor)]
        self._sharded_parameters = [each.parameter for each in self._sharded]
        memory = list(local_tensors(self._sharded_parameters))
        self._memory = list(map(id, memory))
        self._addresses = [each.data_ptr() for each in (*memory, *(each.parameter for each in self._plain))]
        shards = iter(each.shard for each in shown)
        self._shards_of_groups = [[next(shards) for _ in group] for group in params]
        held = {id(each.parameter) for each in shown}  # by id: hashing a tensor runs Python code
        others = {key: values for key, values in own_state.items() if id(key) not in held}
        self._state: defaultdict[Any, Any] = defaultdict(dict, others)
        self._state.update((each.shard, dict(each.state)) for each in shown if each.state)
        own_objects = _objects(own_state)
        self._own_objects = list(map(id, own_objects))
        # References to the objects that are not tensors, so that no other object gets their ids.
        self._kept = [value for value in own_objects if not isinstance(value, torch.Tensor | dict)]
        self._objects = _objects(self._state)
        self._is_in_use = False
        # Not the parameters themselves: `torch.utils.swap_tensors` refuses tensors with weak references.
        of_parameters = (values for values in own_state.values() if isinstance(values, dict))
        values = chain.from_iterable(map(dict.values, of_parameters))
        self._watched = _watch(self, [*memory, *(value for value in values if isinstance(value, torch.Tensor))])
        self._gradients: list[torch.Tensor | None] | None = None
        self._having: list[_Shown] = []  # those with a gradient
        self._in_common: tuple[bool, set[torch.device]] | None = None  # of all shards

    def is_current(self) -> bool:
        """Return whether the optimizer still has the parameters, the memory and the state that were prepared."""
        groups, memory = self._optimizer.param_groups, list(local_tensors(self._sharded_parameters))
        return (
            bool(self._own_objects)
            and [len(group["params"]) for group in groups] == [len(shards) for shards in self._shards_of_groups]
            and all(map(is_, chain.from_iterable(group["params"] for group in groups), self._parameters))
            and list(map(id, memory)) == self._memory
            and [each.data_ptr() for each in (*memory, *(each.parameter for each in self._plain))] == self._addresses
            and list(map(id, _objects(self._optimizer.state))) == self._own_objects
        )

    def release(self) -> None:
        """Release all shards and their state, unless the optimizer uses them now. `is_current` then returns False."""
        self._own_objects = []
        if not self._is_in_use:
            self._shown, self._sharded, self._plain, self._having = [], [], [], []
            self._shards_of_groups, self._gradients, self._objects, self._watched = [], None, [], []
            self._state = defaultdict(dict)

    def take_gradients(self) -> bool:
        """Give the shards the gradients that their parameters have now.

        Returns:
            Whether all gradients have the sharding and dtype of their parameters. If not, no gradient was taken. With
            `as_parameters` this is not checked.
        """
        gradients = [each.parameter.grad for each in self._shown]
        if self._gradients is not None and all(map(is_, gradients, self._gradients)):
            return True
        having = list(filter(_has_gradient, self._shown))
        if not (self._as_parameters or self._are_usable(having)):
            return False
        with torch.no_grad():
            for each in having:
                each.take_gradient()
        for each in set(self._having).difference(having):
            each.shard.grad = None
        self._gradients, self._having = gradients, having
        return True

    def _are_usable(self, having: list["_Shown"]) -> bool:
        gradients = [_gradient(each) for each in having]
        parameters = [each.parameter for each in having]
        are_sharded = [type(gradient) is DTensor for gradient in gradients]
        if are_sharded != [type(parameter) is DTensor for parameter in parameters]:
            return False
        if [gradient.dtype for gradient in gradients] != [parameter.dtype for parameter in parameters]:
            return False
        gradients, parameters = list(compress(gradients, are_sharded)), list(compress(parameters, are_sharded))
        pairs = zip(layouts(gradients), layouts(parameters), gradients, parameters, strict=True)
        return all(own is other or is_sharded_like(gradient, parameter) for own, other, gradient, parameter in pairs)

    def drop_gradients(self) -> None:
        """Release the gradients."""
        for each in self._having:
            each.shard.grad = None
        self._gradients, self._having = None, []

    def are_on(self, device: torch.device, *, with_state: bool) -> bool:
        """Return whether all shards with a gradient are on `device`, and, if `with_state`, have optimizer state."""
        if len(self._having) < len(self._shown):
            have_state, devices = _in_common(self._having)
        else:
            have_state, devices = self._in_common = self._in_common or _in_common(self._shown)
        return (have_state or not with_state) and devices <= {device}

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Give the optimizer the shards inside the context. On exit restore its DTensors, and store its new state."""
        optimizer, own_state = self._optimizer, self._optimizer.state
        own_params = [group["params"] for group in optimizer.param_groups]
        updated = [each.parameter for each in self._having]
        self._is_in_use = True
        try:
            optimizer.state = self._state
            for group, shards in zip(optimizer.param_groups, self._shards_of_groups, strict=True):
                group["params"] = list(shards)
            yield
        except BaseException:
            self._own_objects = []  # the optimizer may have changed anything: prepare again
            self._is_in_use = False
            raise
        finally:
            optimizer.state = own_state
            for group, params in zip(optimizer.param_groups, own_params, strict=True):
                group["params"] = params
            # An update of the DTensors does this too: autograd, and caches keyed by the version, detect the change.
            torch.autograd.graph.increment_version(updated)
        self._store(own_state)
        self._is_in_use = False
        if not self._own_objects:
            self.release()

    def _store(self, own_state: dict[Any, Any]) -> None:
        """Store new state of the optimizer. If there is any, `is_current` returns False afterwards."""
        with torch.no_grad():
            if self._as_parameters:
                for each in self._shown:
                    each.copy_back()
            if _are_same(_objects(self._state), self._objects):
                return  # the optimizer changed its state in place
            for each in self._shown:
                each.keep(self._state.get(each.shard, {}), own_state)
        own_shards = {id(each.shard) for each in self._shown}
        own_state.update({key: values for key, values in self._state.items() if id(key) not in own_shards})
        self._own_objects = []  # `is_current` returns False: the next step prepares again


def _watch(shards: PreparedShards, tensors: Iterable[torch.Tensor]) -> list[weakref.ref[torch.Tensor]]:
    """Release the shards when one of these tensors is freed. Return weak references, to be retained until then."""
    of_shards = weakref.ref(shards)

    def release(_: object) -> None:
        if (found := of_shards()) is not None:
            found.release()

    return [weakref.ref(tensor, release) for tensor in tensors]


def _in_common(shown: Sequence["_Shown"]) -> tuple[bool, set[torch.device]]:
    """Return whether all these shards have their optimizer state, and the set of their devices."""
    return all(each.has_state for each in shown), {each.shard.device for each in shown}


def _has_gradient(each: "_Shown") -> bool:
    return each.parameter.grad is not None


def _gradient(each: "_Shown") -> torch.Tensor:
    if each.parameter.grad is None:
        raise AssertionError("expected a parameter with a gradient, got None")
    return each.parameter.grad


def _objects(state: dict[Any, Any]) -> list[object]:
    """Return the keys, the dicts and the values of an optimizer's state, to compare them by identity."""
    of_parameters = [values for values in state.values() if isinstance(values, dict)]
    return [*state, *state.values(), *chain.from_iterable(map(dict.values, of_parameters))]


def _are_same(found: list[object], expected: list[object]) -> bool:
    return len(found) == len(expected) and all(map(is_, found, expected))


def is_sharded_like(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether two DTensors have the same mesh and placements."""
    if not isinstance(tensor, DTensor) or not isinstance(parameter, DTensor):
        raise AssertionError(f"expected DTensors, got {type(tensor).__name__} and {type(parameter).__name__}")
    own, mesh = tensor.device_mesh, parameter.device_mesh
    # By identity first, because comparing two meshes by value takes longer than everything else here.
    return (own is mesh or own == mesh) and tensor.placements == parameter.placements


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory that, unlike a view, keeps no other tensor alive."""
    alias: torch.Tensor = tensor.new_empty(0).set_(tensor)  # type: ignore[call-overload]  # takes tensors too
    return alias


class _Shown:
    """One parameter, and the plain shard of it that an optimizer gets.

    Kernels of other libraries may not accept tensors without elements. So a rank whose shard has no elements gives the
    optimizer a row of zeros in its place, and the optimizer makes state for that row.
    """

    __slots__ = ("_is_empty", "_shape", "has_state", "parameter", "shard", "state")

    def __init__(self, parameter: torch.Tensor, state: dict[str, Any] | None, as_parameter: bool) -> None:
        self.parameter = parameter
        local = local_part(parameter)
        self._shape = local.shape
        self._is_empty = local.numel() == 0 and num_shards_of(parameter) > 1
        shard = self.shown(local)
        self.shard = nn.Parameter(shard, requires_grad=parameter.requires_grad) if as_parameter else _alias(shard)
        """A plain tensor in the parameter's memory, whose `grad` is the shard of the parameter's gradient."""
        self.state = {
            name: self.shown(value) if isinstance(value, DTensor) else value for name, value in (state or {}).items()
        }
        """The parameter's state with plain shards, as the optimizer gets it."""
        self.has_state = bool(self.state) and not any(value is None for value in self.state.values())
        """Whether the optimizer has state for the parameter, so that a step makes none."""

    def take_gradient(self) -> None:
        """Give the shard the gradient of the parameter."""
        self.shard.grad = self.shown(_gradient(self))

    def shown(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a tensor, or a row of zeros if the shard has no elements."""
        local = local_part(tensor)
        return local.new_zeros([length or 1 for length in local.shape]) if self._is_empty else local

    def copy_back(self) -> None:
        """Copy the shard to the parameter's memory if the optimizer assigned `parameter.data`."""
        memory = local_part(self.parameter)
        if not self._is_empty and self.shard.data_ptr() != memory.data_ptr():
            memory.copy_(self.shard)

    def keep(self, state: dict[str, Any], own_state: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Store the state that the optimizer left for the parameter.

        Tensors of the shard's shape become DTensors. If one tensor of at least one dimension has another shape, or is
        an integer tensor, all tensors stay plain: they are quantized values, or statistics of this rank's shard, and
        belong together.
        """
        if state.keys() == self.state.keys() and all(map(is_, state.values(), self.state.values())):
            return  # the optimizer changed its state in place
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
        return DTensor.from_local(
            value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

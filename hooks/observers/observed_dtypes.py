"""Observers of the dtypes that occur in a step, for `Ledger.verify`. They run in a verification only.

Hooks return None, and the dispatch mode returns the op's own result. A dispatch mode disables compilation and may
change last bits of results, so these observers do not run in training.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from zeroamp.hooks._torch.dispatch import StorageWeakRef, storage_of
from zeroamp.hooks.observers.tracing import OpRecorder
from zeroamp.hooks.tensors import tensors_in
from zeroamp.policies.dtypes import short_name

NO_TENSOR = "none"
"""Recorded in place of a dtype where there is no tensor, as in the state of SGD without momentum."""


class Observations:
    """The dtypes that were seen, by parameter and by boundary: the key of a column of the ledger, such as "param"."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, dict[str, str]]] = {}
        """FQN -> boundary -> short name of a dtype -> where it was seen first."""

    def see(self, fqn: str, boundary: str, dtype: torch.dtype | None, where: str) -> None:
        """Record a dtype of the parameter `fqn` at a boundary, or that there was no tensor (None).

        For a dtype seen twice, the first `where` stays.
        """
        name = NO_TENSOR if dtype is None else short_name(dtype)
        self.seen.setdefault(fqn, {}).setdefault(boundary, {}).setdefault(name, where)


class OpObserver(OpRecorder):  # type: ignore[no-untyped-call]
    """Records the compute dtype of each op that reads a parameter, or a view, cast or copy of one.

    The compute dtype is the dtype to which the op's floating-point inputs promote. Casts and copies are followed and
    not recorded: autocast's own cast of a parameter that was all-gathered in fp32 is such a cast.
    """

    _MOVES = frozenset({"_to_copy", "cat", "clone", "index", "index_select", "stack"})

    def __init__(self, observations: Observations) -> None:
        super().__init__()
        self._observations = observations
        self._names: dict[StorageWeakRef | None, tuple[str, ...]] = {}  # by storage: views share it

    def follow(self, fqn: str, parameter: torch.Tensor) -> None:
        """Record the ops that read `parameter` from now on, under the name `fqn`."""
        self._names[storage_of(parameter)] = (fqn,)

    def forget(self) -> None:
        """Stop following all parameters and their copies."""
        self._names.clear()

    def see(self, func: Any, arguments: Any, out: Any) -> None:
        """Record an op if it reads a followed parameter."""
        inputs = list(_plain_tensors(arguments))
        names = tuple(dict.fromkeys(name for each in inputs for name in self._names.get(storage_of(each), ())))
        fresh = [tensor for tensor in _plain_tensors(out) if storage_of(tensor) not in self._names] if names else []
        if not fresh:
            return  # a view, or a write into an unsharded parameter's own storage
        if func.overloadpacket.__name__ in self._MOVES:
            self._names.update((storage_of(tensor), names) for tensor in fresh)
            return
        dtypes = [tensor.dtype for tensor in inputs if tensor.dtype.is_floating_point]
        dtype = dtypes[0] if dtypes else inputs[0].dtype
        for other in dtypes[1:]:
            dtype = torch.promote_types(dtype, other)
        for name in names:
            self._observations.see(name, "compute", dtype, str(func.overloadpacket))


class UnitObserver:
    """Records the dtypes of each unsharded parameter and of its raw gradient, and makes `ops` follow the parameter."""

    def __init__(self, observations: Observations, ops: OpObserver, sums_in: torch.dtype | None) -> None:
        """Take where to record, and `sums_in`, the dtype of unsharded sums over micro-batches; None without such sums.

        From torch 2.15 on, autograd casts a gradient to `sums_in` before any hook runs. Its raw dtype is then unknown,
        and is not recorded.
        """
        self._observations = observations
        self._ops = ops
        self._sums_in = sums_in
        self._watched: dict[nn.Parameter, RemovableHandle] = {}

    def attach(self, root: nn.Module, units: Mapping[str, Iterable[str]]) -> list[RemovableHandle]:
        """Register forward pre-hooks; return their handles. Call after FSDP2 and the typed groups have registered.

        Args:
            root: the wrapped model.
            units: FQN of a module -> FQNs of the parameters whose dtypes are recorded when it runs.
        """

        def observer(module_fqn: str, fqns: tuple[str, ...]) -> RemovableHandle:
            def look(_module: nn.Module, _args: Any) -> None:
                for fqn in fqns:
                    self._look(fqn, root.get_parameter(fqn), module_fqn or "the root")

            return root.get_submodule(module_fqn).register_forward_pre_hook(look)

        return [observer(module_fqn, tuple(fqns)) for module_fqn, fqns in units.items()]

    def detach(self) -> None:
        """Remove the hooks on unsharded parameters."""
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    def _look(self, fqn: str, parameter: nn.Parameter, unit: str) -> None:
        if isinstance(parameter, DTensor):
            return  # sharded
        values = _values_of(parameter)
        self._observations.see(fqn, "param", values.dtype, f"the forward of {unit}")
        self._ops.follow(fqn, values)
        if parameter.requires_grad and parameter not in self._watched:
            self._watched[parameter] = self._watch_gradient(fqn, parameter)

    def _watch_gradient(self, fqn: str, parameter: nn.Parameter) -> RemovableHandle:
        def look(gradient: torch.Tensor) -> None:
            is_cast = self._sums_in is not None and parameter.grad_dtype == self._sums_in != parameter.dtype
            if not is_cast:
                self._observations.see(fqn, "gradient", gradient.dtype, "backward")

        return parameter.register_hook(look)  # type: ignore[no-untyped-call,no-any-return]


def _plain_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the strided tensors that are not DTensors in an op's arguments or results: those with a storage."""
    for tensor in tensors_in(value):
        if not isinstance(tensor, DTensor) and tensor.layout == torch.strided:
            yield tensor


def _values_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the values of an unsharded parameter: itself, or what a float8 one of torchao has.

    The dtype of the float8 parameter itself is that of its gradient.
    """
    values: torch.Tensor = getattr(parameter, "_data", parameter)
    return values

"""Compares what two traced runs compute: whether a model that reads a parameter's dtype depends on that dtype.

Each tensor gets a hash of the op that made it, of the op's other arguments, and of the hashes of its inputs. Two runs
with equal hashes of all outputs and gradients ran the same ops on the same values. A parameter that is all-gathered in
the low dtype has the hash of the cast that autocast makes of it.
"""

from functools import partial
from typing import Any

import torch

from zeroamp.discovery.use_recorder import MOVES
from zeroamp.hooks._torch.dispatch import StorageWeakRef, is_view_op, storage_of
from zeroamp.hooks.observers.tracing import OpRecorder
from zeroamp.hooks.tensors import map_tensors, tensors_in

_MADE_CONTIGUOUS = {"convolution": 0, "convolution_backward": 1}
"""Op -> position of the tensor that torch makes contiguous if it has 3 dimensions. Its strides change no bit then."""


class DataFlow(OpRecorder):
    """Hashes what a run computes. The ops return their results unchanged."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: the low dtype of autocast."""
        super().__init__()
        self._dtype = dtype
        self._hashes: dict[StorageWeakRef, int] = {}
        self._parameters: dict[StorageWeakRef, str] = {}
        self._aliases: dict[StorageWeakRef, tuple[int, int]] = {}
        """Storage of a cast -> hash of the storage that has the same values, and the offset there. That storage is of a
        parameter in the low dtype, or of a tensor that was cast from the low dtype and back."""
        self._before_cast: dict[StorageWeakRef | None, tuple[Any, Any]] = {}
        """Storage of a cast from the low dtype, or of such casts that an op moved -> its size and strides, and the key
        that it has without the casts."""
        self._copies: dict[StorageWeakRef | None, tuple[Any, Any]] = {}
        """Storage of a cast to the low dtype -> its size and strides, and the key of a tensor with the same values in
        other strides."""
        self._num_inputs = self._num_random = 0
        self.outputs: list[Any] = []
        self.gradients: dict[str, list[Any]] = {}

    def add(self, name: str, _parameter: torch.Tensor, replacement: torch.Tensor) -> None:
        """Hash a parameter of the run by its name. A parameter in the low dtype gets the hash of a cast."""
        storage = storage_of(replacement)
        if storage is None:
            return
        self._parameters[storage], self._hashes[storage] = name, hash(("parameter", name))
        if replacement.dtype == self._dtype:
            self._aliases[storage] = hash(("low", name)), 0
        if replacement.requires_grad:
            replacement.register_hook(partial(self._note_gradient, name))  # type: ignore[no-untyped-call]

    def attached(self) -> "DataFlow":
        """Return the context in which all ops are hashed."""
        return self

    def note_outputs(self, outputs: Any) -> None:
        """Record what the model returns."""
        self.outputs = [self._key(tensor) for tensor in tensors_in(outputs)]

    def is_same(self, other: "DataFlow") -> bool:
        """Return whether another run has the same outputs and gradients."""
        return self.outputs == other.outputs and self.gradients == other.gradients

    def see(self, func: Any, arguments: Any, out: Any) -> None:
        """Hash the results of an op."""
        if is_view_op(func):
            return
        inputs = list(tensors_in(arguments))
        keys, name = [self._key(tensor) for tensor in inputs], func.overloadpacket.__name__
        if (index := _MADE_CONTIGUOUS.get(name)) is not None and inputs[index].dim() == 3 and not inputs[index].is_xpu:
            keys[index] = _key_of_whole(self._copies, inputs[index]) or keys[index]
        others = repr(map_tensors(lambda _tensor: None, arguments))
        is_cast = name == "_to_copy"
        if is_cast and self._is_named_cast(inputs[0], out, keys[0]):
            return
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._num_random += 1
            others += f" {self._num_random}"
        before_casts = [_key_of_whole(self._before_cast, each) for each in inputs] if name in MOVES else [None]
        mutated = [
            value
            for argument, value in zip(func._schema.arguments, arguments[0], strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for index, tensor in enumerate(tensors_in((out, mutated))):
            if (storage := storage_of(tensor)) is not None:
                self._aliases.pop(storage, None)
                if not is_cast:
                    self._before_cast.pop(storage, None)
                    self._copies.pop(storage, None)
                self._hashes[storage] = hash((str(func), others, tuple(keys), index))
                if all(before_casts):
                    moved, shape = hash((str(func), others, tuple(before_casts), index)), _shape(tensor)
                    self._before_cast[storage] = shape, (moved, 0, *shape, self._dtype)

    def _is_named_cast(self, source: torch.Tensor, out: torch.Tensor, key: Any) -> bool:
        """Return whether the values of a cast have a hash already. Records casts from the low dtype."""
        storage, cast = storage_of(source), storage_of(out)
        if storage is None or cast is None:
            return False
        if source.dtype == self._dtype:
            self._before_cast[cast] = _shape(out), key
        if out.dtype != self._dtype or out.stride() != source.stride():
            return False
        if storage in self._parameters:
            self._aliases[cast] = hash(("low", self._parameters[storage])), int(source.storage_offset())
            return True
        before = _key_of_whole(self._before_cast, source)
        if before is None:
            return False
        if before[2:4] != _shape(out):
            self._copies[cast] = _shape(out), before
            return False
        self._aliases[cast] = before[0], before[1]
        return True

    def _key(self, tensor: torch.Tensor) -> Any:
        """Return the hash of a tensor's storage, and which of its elements the tensor contains."""
        storage = storage_of(tensor)
        if storage is None:
            return (object(),)  # equal to no other
        shape = *_shape(tensor), tensor.dtype
        if storage in self._aliases:
            made, offset = self._aliases[storage]
            return made, offset + tensor.storage_offset(), *shape
        if storage not in self._hashes:
            self._num_inputs += 1
            self._hashes[storage] = hash(("input", self._num_inputs))
        return self._hashes[storage], tensor.storage_offset(), *shape

    def _note_gradient(self, name: str, gradient: torch.Tensor) -> None:
        key = _key_of_whole(self._before_cast, gradient) or self._key(gradient)
        self.gradients.setdefault(name, []).append(key)


def _key_of_whole(keys: dict[StorageWeakRef | None, tuple[Any, Any]], tensor: torch.Tensor) -> Any:
    """Return the key that `keys` has for a tensor; None if it has none, or if the tensor is a part of what it has."""
    shape, key = keys.get(storage_of(tensor), (None, None))
    return key if shape == _shape(tensor) else None


def _shape(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(tensor.size()), tensor.stride()

"""Reads files in another layout than the model, by the rules with which transformers renames and fuses tensors.

transformers has, for each architecture, the rules that `from_pretrained` applies to the tensors of a file: other names,
and operations such as stacking the experts of a layer. These rules decide here which part of which file a rank reads.
Stacking and concatenating are applied to the rank's parts. For any other operation a rank reads the sources of one
tensor whole, and runs transformers' own operation.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeroamp.weights.model_weights import ShardRange


class Part(Protocol):
    """The interface of a tensor that can be read in part."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    @property
    def dtype_name(self) -> str:
        """Name of the dtype in safetensors: "F32", "BF16"."""

    @property
    def sources(self) -> Sequence["Stored"]:
        """The tensors of files from which this one is computed."""

    def read(self, part: ShardRange | None) -> torch.Tensor:
        """Return `part` of the tensor, or the whole tensor for None, on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A tensor that a file contains as it is."""

    name: str
    open: Callable[[], Any]
    """Returns the open safetensors file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self.open().get_slice(self.name).get_shape())

    @property
    def dtype_name(self) -> str:
        """Name of the dtype in safetensors: "F32", "BF16"."""
        return str(self.open().get_slice(self.name).get_dtype())

    @property
    def sources(self) -> Sequence["Stored"]:
        """Only this tensor."""
        return [self]

    def read(self, part: ShardRange | None) -> torch.Tensor:
        """Return `part` of the tensor, or the whole tensor for None."""
        file = self.open()
        tensor: torch.Tensor = file.get_tensor(self.name) if part is None else file.get_slice(self.name)[part.slices]
        return tensor


class _Made:
    """Base class of tensors that are computed from several parts."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    @property
    def dtype_name(self) -> str:
        """That of the first part."""
        return self.parts[0].dtype_name

    @property
    def sources(self) -> Sequence[Stored]:
        """The tensors of files from which all parts are computed."""
        return [source for part in self.parts for source in part.sources]


class Stacked(_Made):
    """Tensors of one shape, stacked along a new dimension 0."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of parts, then the shape of one part."""
        return len(self.parts), *self.parts[0].shape

    def read(self, part: ShardRange | None) -> torch.Tensor:
        """Return `part` of the tensor, or the whole for None. Reads no other elements."""
        if part is not None and part.dim == 0:
            chosen = self.parts[part.start : part.start + part.length]
            return torch.stack([each.read(None) for each in chosen]) if chosen else self._empty()
        inner = None if part is None else ShardRange(part.dim - 1, part.start, part.length)
        return torch.stack([each.read(inner) for each in self.parts])

    def _empty(self) -> torch.Tensor:
        first = self.parts[0].read(ShardRange(0, 0, 0))  # has the file's dtype
        return first.new_empty((0, *self.shape[1:]))


class Concatenated(_Made):
    """Tensors concatenated along a dimension."""

    def __init__(self, parts: Sequence[Part], dim: int) -> None:
        super().__init__(parts)
        self.dim = dim % len(parts[0].shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first part, with the sum of all lengths in the concatenated dimension."""
        lengths = sum(part.shape[self.dim] for part in self.parts)
        first = self.parts[0].shape
        return *first[: self.dim], lengths, *first[self.dim + 1 :]

    def read(self, part: ShardRange | None) -> torch.Tensor:
        """Return `part` of the tensor, or the whole for None. Reads no other elements."""
        if part is None or part.dim != self.dim:
            return torch.cat([each.read(part) for each in self.parts], self.dim)
        found, offset = [], 0
        for each in self.parts:
            length = each.shape[self.dim]
            start, end = max(part.start - offset, 0), min(part.start + part.length - offset, length)
            if start < end:
                found.append(each.read(ShardRange(self.dim, start, end - start)))
            offset += length
        return torch.cat(found, self.dim) if found else self.parts[0].read(ShardRange(self.dim, 0, 0))


class Converted(_Made):
    """The tensor `name` among the results of transformers' own operations, which read whole tensors."""

    def __init__(self, parts: Sequence[Part], name: str, convert: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        super().__init__(parts)
        self._name, self._convert = name, convert
        self._shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor. The first call computes the tensor."""
        if self._shape is None:
            self._shape = tuple(self._whole().shape)
        return self._shape

    def _whole(self) -> torch.Tensor:
        made: Any = self._convert()[self._name]
        tensor: torch.Tensor = made[0] if isinstance(made, list) else made
        return tensor

    def read(self, part: ShardRange | None) -> torch.Tensor:
        """Compute the whole tensor, and return `part` of it, or all of it for None."""
        whole = self._whole()
        return whole if part is None else whole[part.slices].clone()


def parts_of_model(root: nn.Module, stored: Mapping[str, Stored], names: set[str]) -> dict[str, Part]:
    """Return the tensors of files by their names in a transformers model. Tensors without a rule keep their names.

    Args:
        root: the model, to which `fully_shard` may have been applied. If it is not transformers', all names stay.
        stored: the tensors of the files, by name.
        names: the names of all tensors of the model.
    """
    library = sys.modules.get("transformers")  # imported if the model is a transformers model
    if library is None or not isinstance(root, library.PreTrainedModel):
        return dict(stored)
    loading, renamings, converters = _rules(root)
    meta = dict.fromkeys(names, True)
    prefix = root.base_model_prefix
    found: dict[str, Part] = {}
    gathered: dict[str, tuple[Any, dict[str, list[Stored]]]] = {}  # first target -> converter, its sources
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    for name in sorted(stored, key=loading.dot_natural_key):
        new, pattern = loading.rename_source_key(name, renamings, converters, prefix, meta)
        if new not in meta and name in meta:
            new, pattern = loading.rename_source_key(name, [], [], prefix, meta)
        if pattern is None or new not in meta:
            found[new if new in meta else name] = stored[name]
            continue
        converter, sources = gathered.setdefault(new, (by_pattern[pattern], defaultdict(list)))
        sources[pattern].append(stored[name])
    for target, (converter, sources) in gathered.items():
        found.update(_made(target, converter, sources, root))
    return found


def _made(target: str, converter: Any, sources: dict[str, list[Stored]], root: nn.Module) -> Iterator[tuple[str, Part]]:
    """Yield (name in the model, tensor) of each tensor that a converter computes."""
    part = _known(converter, sources)
    if part is not None:
        yield target, part
        return

    def convert() -> Mapping[str, torch.Tensor]:
        made: dict[str, Any] = {pattern: [each.read(None) for each in parts] for pattern, parts in sources.items()}
        for operation in converter.operations:
            made = operation.convert(
                made,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=target,
                model=root,
                config=root.config,
                missing_keys=None,
            )
        return made

    first = converter.target_patterns[0]
    parts = [each for pattern in sources.values() for each in pattern]
    for pattern in converter.target_patterns:
        yield target.replace(first, pattern, 1), Converted(parts, pattern, convert)


def _known(converter: Any, sources: dict[str, list[Stored]]) -> Part | None:
    """Return the converter's tensor if its operations can be applied to parts, else None."""
    names = [type(operation).__name__ for operation in converter.operations]
    if len(converter.target_patterns) != 1 or not set(names) <= {"MergeModulelist", "Concatenate"}:
        return None
    parts: list[Part] = []
    for pattern in converter.source_patterns:
        if pattern in sources:
            of_pattern = sources[pattern]
            parts += [Stacked(of_pattern)] if names[0] == "MergeModulelist" else of_pattern
    if names == ["MergeModulelist"] and len(parts) == 1 and converter.operations[0].dim == 0:
        return parts[0]
    if names in (["Concatenate"], ["MergeModulelist", "Concatenate"]):
        stacks = converter.operations[0].dim == 0 or names[0] == "Concatenate"
        return Concatenated(parts, converter.operations[-1].dim) if stacks else None
    return None


def _rules(root: nn.Module) -> tuple[Any, list[Any], list[Any]]:
    """Return transformers' module `core_model_loading`, and the renamings and the converters of a model."""
    from transformers import conversion_mapping, core_model_loading

    rules = conversion_mapping.get_model_conversion_mapping(_outline(root, {}))
    converter = core_model_loading.WeightConverter
    renamings = [rule for rule in rules if not isinstance(rule, converter)]
    return core_model_loading, renamings, [rule for rule in rules if isinstance(rule, converter)]


def _outline(module: nn.Module, outlines: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a tree of modules with the names of `module`'s, without tensors: transformers finds its rules by it.

    transformers looks rules up by the classes and configs of the models in the tree, and `fully_shard` has changed the
    classes. The models of the returned tree have the classes before. `outlines` has the modules that were returned.
    """
    if module not in outlines:
        is_model = isinstance(module, sys.modules["transformers"].PreTrainedModel)
        before = next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))
        outline: Any = before.__new__(before) if is_model else nn.Module()
        nn.Module.__init__(outline)  # not that of the model, which would make tensors
        if is_model:
            outline.config = module.config
        outlines[module] = outline
        for name, child in module.named_children():
            setattr(outline, name, _outline(child, outlines))
    return outlines[module]

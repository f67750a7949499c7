"""Reads files in another layout than the model, by the rules with which transformers renames and fuses tensors.

transformers has, for each architecture, the rules that `from_pretrained` applies to the tensors of a file: other names,
and operations such as stacking the experts of a layer. A renamed tensor is read in part. For an operation, each rank
reads the sources of one tensor whole, and runs transformers' own operation.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

Slices = tuple[slice, ...]
"""One slice for each dimension."""


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
    def sources(self) -> "list[Stored]":
        """Only this tensor."""
        return [self]

    def read(self, part: Slices | None = None) -> torch.Tensor:
        """Return `part` of the tensor, or the whole tensor for None, on the CPU."""
        file = self.open()
        tensor: torch.Tensor = file.get_tensor(self.name) if part is None else file.get_slice(self.name)[part]
        return tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """A tensor that transformers' operations compute from whole tensors of files. It has the interface of `Stored`."""

    name: str
    """Its name among the results of the operations."""
    sources: list[Stored]
    convert: Callable[[Callable[[Stored], torch.Tensor]], Mapping[str, Any]]
    """Runs the operations on what the given function returns for each source."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, computed on the meta device."""
        return tuple(self._whole(lambda source: torch.empty(source.shape, device="meta")).shape)

    @property
    def dtype_name(self) -> str:
        """That of the first source."""
        return self.sources[0].dtype_name

    def _whole(self, read: Callable[[Stored], torch.Tensor]) -> torch.Tensor:
        made = self.convert(read)[self.name]
        tensor: torch.Tensor = made[0] if isinstance(made, list) else made
        return tensor

    def read(self, part: Slices | None = None) -> torch.Tensor:
        """Compute the whole tensor, and return `part` of it, or all of it for None."""
        whole = self._whole(lambda source: source.read())
        return whole if part is None else whole[part].clone()


Part = Stored | Converted


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


def _made(
    target: str, converter: Any, sources: dict[str, list[Stored]], root: nn.Module
) -> Iterator[tuple[str, Converted]]:
    """Yield (name in the model, tensor) of each tensor that a converter computes."""

    def convert(read: Callable[[Stored], torch.Tensor]) -> Mapping[str, Any]:
        made: dict[str, Any] = {pattern: [read(each) for each in parts] for pattern, parts in sources.items()}
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
        yield target.replace(first, pattern, 1), Converted(name=pattern, sources=parts, convert=convert)


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

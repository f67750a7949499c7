"""Reads and writes tensors in the layout in which a transformers model is published.

transformers has, for each architecture, the rules that `from_pretrained` applies to the tensors of a file, and
`save_pretrained` in reverse: other names, and operations such as stacking the experts of a layer. A renamed tensor is
read in part. For an operation, each rank reads the sources of one tensor whole.
"""

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeroamp.weights.files import Stored


@dataclass(frozen=True, slots=True)
class Converted:
    """A tensor that transformers' operations compute from whole tensors of files. It has the interface of `Stored`."""

    name: str
    """Its name in the model."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    convert: Callable[[Callable[[Stored], torch.Tensor]], Mapping[str, torch.Tensor]]
    """Runs the operations on what the given function returns for each source."""

    def read(self, part: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Compute the whole tensor, and return `part` of it, or all of it for None."""
        whole = self.convert(Stored.read)[self.name]
        return whole if part is None else whole[part]


Source = Stored | Converted
"""Where the values of a weight are: in one tensor of a file, or in several that are converted."""


def parts_of_model(root: nn.Module, stored: Mapping[str, Stored], names: Iterable[str]) -> dict[str, Source]:
    """Return the tensors of files by their names in a transformers model, which has tensors of the given names.

    Tensors without a rule, and those of other models, keep their names.
    """
    outline = outline_of_model(root)
    if outline is None:
        return dict(stored)
    from transformers import conversion_mapping, core_model_loading

    rules = conversion_mapping.get_model_conversion_mapping(outline)
    converters = [rule for rule in rules if isinstance(rule, core_model_loading.WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, core_model_loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    meta: dict[str, Any] = dict.fromkeys(names, True)
    found: dict[str, Source] = {}
    sources: dict[str, list[tuple[str, Stored]]] = defaultdict(list)  # first target -> source pattern, tensor
    for name in sorted(stored, key=core_model_loading.dot_natural_key):
        rename = partial(core_model_loading.rename_source_key, name)
        new, pattern = rename(renamings, converters, root.base_model_prefix, meta)
        if new not in meta and name in meta:
            new, pattern = rename([], [], root.base_model_prefix, meta)
        if pattern is None or new not in meta:
            found[new if new in meta else name] = stored[name]
        else:
            sources[new].append((pattern, stored[name]))
    for target, parts in sources.items():
        convert = partial(_convert, outline, target, by_pattern[parts[0][0]], parts)
        shapes = convert(lambda source: torch.empty(source.shape, dtype=source.dtype, device="meta"))
        found |= {name: Converted(name, tuple(made.shape), made.dtype, convert) for name, made in shapes.items()}
    return found


def _convert(
    outline: Any, target: str, converter: Any, parts: list[tuple[str, Stored]], read: Callable[[Stored], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Run a converter of transformers. Return the tensors by their names in the model."""
    converter = copy.deepcopy(converter)
    for pattern, source in parts:
        converter.add_tensor(target, source.name, pattern, partial(read, source))
    made: dict[str, Any] = converter.convert(target, model=outline, config=outline.config)
    return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


def joins_tensors(outline: Any) -> bool:
    """Return whether `publish` computes a tensor from several: it then needs all tensors of a layer at once.

    `outline`: what `outline_of_model` returned.
    """
    if outline is None:
        return False
    from transformers import conversion_mapping

    rules = getattr(outline, "_weight_conversions", None) or conversion_mapping.get_model_conversion_mapping(outline)
    return any(len(getattr(rule, "target_patterns", ())) > 1 for rule in rules)


def publish(outline: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Bring the tensors of a transformers model into the layout that its `save_pretrained` writes.

    `outline`: what `outline_of_model` returned.
    """
    if outline is None:
        return
    from transformers.core_model_loading import revert_weight_conversion

    made = dict(revert_weight_conversion(outline, tensors))
    tensors.clear()
    tensors.update((name, tensor.contiguous()) for name, tensor in made.items())


def outline_of_model(root: nn.Module) -> Any:
    """Return a tree of modules for which transformers finds the rules of `root`; None if `root` is not transformers'.

    transformers looks rules up by the classes and configs of the models in the tree, and `fully_shard` has changed the
    classes. The returned tree has the names and parameters of `root`'s, and the classes before.
    """
    library = sys.modules.get("transformers")  # imported if the model is a transformers model
    if library is None or not isinstance(root, library.PreTrainedModel):
        return None
    outlines: dict[nn.Module, nn.Module] = {}

    def outline_of(module: nn.Module) -> nn.Module:
        if module not in outlines:
            is_model = isinstance(module, library.PreTrainedModel)
            before = next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))
            outline: nn.Module = before.__new__(before) if is_model else nn.Module()  # type: ignore[assignment]
            outlines[module] = outline
            nn.Module.__init__(outline)  # not that of the model, which would make tensors
            outline._parameters.update(module._parameters)  # operations look at their shapes
            for name in ("config", "_weight_conversions") if is_model else ():
                if name in vars(module):  # the latter: the rules by which `from_pretrained` has read the model
                    setattr(outline, name, vars(module)[name])
            for name, child in module.named_children():
                setattr(outline, name, outline_of(child))
        return outlines[module]

    return outline_of(root)

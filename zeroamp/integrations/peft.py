"""Adapters of peft: `export_adapter` and `export_merged` write them from a wrapped model, `load_adapter` reads them.

[Note: One layer at a time]
peft merges an adapter inside its layer, with whole tensors. So each layer with an adapter is copied without its
tensors, and the copy gets whole tensors, which the ranks all-gather. peft's own `merge` of the copy computes the merged
weight. The wrapped model is not changed, and a rank holds at most one whole layer.
"""

import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from zeroamp.hooks.typed_groups import Holder
from zeroamp.policies.errors import CheckpointError, some_of
from zeroamp.rank_group import RankGroup
from zeroamp.weights.export import (
    Source,
    export_dtype,
    export_tensors,
    overflow,
    refuse_overflows,
    save_config,
    source_of,
    whole_weight,
)
from zeroamp.weights.files import ADAPTER_STEM
from zeroamp.weights.load import fill_from_file
from zeroamp.weights.model_weights import Weight, file_name, find_weights, live_state
from zeroamp.wrapping.state import wrap_state

_PREFIX = "base_model.model."
_BUILD_AGAIN = "Build the model again, load the whole state dict into it (docs/recipes.md), and call its"
"""Prefix of the tensor names of a `PeftModel`."""


def export_adapter(model: nn.Module, folder: str | os.PathLike[str], adapter: str | None = None) -> Path:
    """Write one adapter of a wrapped model, for `PeftModel.from_pretrained`. All ranks call it.

    The files are those of peft's `save_pretrained`: `adapter_model.safetensors` and `adapter_config.json`, with the
    tensors of `modules_to_save`. Tensors are written in the dtype of their shards: fp32 for trained ones. They are
    all-gathered one by one, and the first rank writes. An earlier adapter in the folder is replaced once the new one is
    complete.

    Args:
        model: from `wrap_model`, with adapters that were added before: a `PeftModel`, or a model after
            `add_adapter` or `inject_adapter_in_model`. Call this between two optimizer steps.
        folder: a folder that all ranks see.
        adapter: name of the adapter. None: the active one.

    Returns:
        The folder of the files: `folder` for the adapter "default", else `folder`/<adapter>, as in peft.

    Raises:
        CheckpointError: on all ranks. The model has no such adapter, peft computes the tensors that it saves for this
            kind of adapter (prompt tuning), the ranks pass different arguments, or a rank cannot write.
        WrapError: the model is not wrapped.
    """
    state = wrap_state(model)
    root, ranks = state.root, RankGroup.for_saving(state.axes.whole)
    name = ranks.run(lambda: _adapter_of(root, adapter))[ranks.rank]
    path = Path(folder) if name == "default" else Path(folder) / name
    # One rank decides for all, since peft may look up the base model's config in a hub.
    names = ranks.on_first(lambda: _adapter_names(root, name))

    def sources() -> list[Source]:
        by_name = {each: weight for weight in find_weights(root) for each in weight.names}
        return [_as_stored(written, by_name[own], state.mesh) for written, own in names.items()]

    with torch.no_grad():
        export_tensors(
            sources,
            path,
            lambda: torch.float32,  # applies to no tensor: all are written as stored
            sys.maxsize,  # peft reads a single file
            lambda draft, _: _save_adapter_config(root, name, draft),
            ranks,
            ADAPTER_STEM,
        )
    return path


def load_adapter(model: nn.Module, folder: str | os.PathLike[str], adapter: str | None = None) -> None:
    """Fill one adapter of a wrapped model from the files of `export_adapter` or peft's `save_pretrained`.

    All ranks call it, and each reads its own part. The base model is not changed. Only tensors are read: the adapter
    keeps the config that it has in the model.

    Args:
        model: from `wrap_model`, with the adapter to fill.
        folder: a folder with `adapter_model.safetensors`, such as `export_adapter` returned.
        adapter: name of the adapter in the model. None: the active one.

    Raises:
        CheckpointError: on all ranks. There is no such file or adapter, or `zeroamp.load_hf` raises it.
        WrapError: the model is not wrapped.
    """
    state = wrap_state(model)
    path = Path(folder).absolute() / f"{ADAPTER_STEM}.safetensors"

    def weights_of() -> dict[str, Weight]:
        if not path.exists():
            raise CheckpointError(
                f"{folder} must be a folder with {path.name}, but has none. Pass the folder that export_adapter "
                "returned."
            )
        names = _adapter_names(state.root, _adapter_of(state.root, adapter))
        by_name = {each: weight for weight in find_weights(state.root) for each in weight.names}
        return {name: by_name[own] for name, own in names.items()}

    fill_from_file(path, weights_of, state.mesh)


def export_merged(
    model: nn.Module,
    folder: str | os.PathLike[str],
    adapter: str | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    max_shard_bytes: int = 5 * 1000**3,
) -> None:
    """Write the base model with one adapter merged into it, for `from_pretrained`. All ranks call it.

    Names, files and `config.json` are those of the model without adapters. Values are those of peft's
    `merge_and_unload()`, computed by peft's layers from the whole tensors of one layer at a time. A 4-bit base of
    bitsandbytes is written dequantized: `merge_and_unload()` would quantize the merged weight again, with another
    rounding. If only one of two tied weights has an adapter, both are written, and the config unties them.

    Args:
        model: see `export_adapter`. It is not changed.
        folder: see `zeroamp.export_hf`.
        adapter: name of the adapter. None: the active one.
        dtype: see `zeroamp.export_hf`.
        max_shard_bytes: see `zeroamp.export_hf`.

    Raises:
        CheckpointError: on all ranks. The model has no such adapter, peft cannot merge this kind of adapter or of
            quantized base, a finite value would be infinite in `dtype`, the ranks pass different arguments, or a rank
            cannot write.
        WrapError: the model is not wrapped.
    """
    state = wrap_state(model)
    root, ranks = state.root, RankGroup.for_saving(state.axes.whole)
    name = ranks.run(lambda: _adapter_of(root, adapter))[ranks.rank]
    merge = _Merge(root, name, state.mesh)

    def change(config: Any) -> None:
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        if merge.is_untied:
            config.tie_word_embeddings = False

    with torch.no_grad():
        export_tensors(
            merge.sources,
            folder,
            lambda: export_dtype(dtype, state.plan.policy.export_dtype),
            max_shard_bytes,
            lambda draft, written: save_config(_base_of(root), draft, written, change),
            ranks,
        )


def _adapter_of(root: nn.Module, asked: str | None) -> str:
    """Return the name of the adapter: the one asked for, or the one active adapter."""
    configs = getattr(root, "peft_config", None)
    if not isinstance(configs, dict) or not configs:
        raise CheckpointError(
            f"{type(root).__name__} has no adapters of peft. Call peft.get_peft_model before zeroamp.wrap_model; "
            "zeroamp.export_hf writes a model without adapters."
        )
    if asked is None:
        active = getattr(root, "active_adapter", None)
        active = active() if callable(active) else active
        names = [active] if isinstance(active, str) else list(active or configs)
        if len(names) != 1:
            raise CheckpointError(
                f"{len(names)} adapters are active ({some_of(names)}), but one call takes one. Pass its name: adapter=."
            )
        asked = names[0]
    if asked not in configs:
        raise CheckpointError(f"The model has no adapter {asked!r}. It has {some_of(list(configs))}: pass one of them.")
    return asked


def _base_of(root: Any) -> nn.Module:
    base: nn.Module = root.get_base_model() if _is_peft_model(root) else root
    return base


def _is_peft_model(root: Any) -> bool:
    return isinstance(root, import_module("peft").PeftModel)


def _adapter_names(root: Any, adapter: str) -> dict[str, str]:
    """Return {name in the file: name in the model} of the tensors that peft saves for an adapter."""
    config = root.peft_config[adapter]
    named = {name: weight.tensor for weight in find_weights(root) for name in weight.names}
    own = {id(tensor): name for name, tensor in reversed(named.items())}
    chosen = {}
    if not config.is_prompt_learning:
        chosen = import_module("peft").get_peft_model_state_dict(root, state_dict=dict(named), adapter_name=adapter)
    if not chosen or any(id(tensor) not in own for tensor in chosen.values()):
        kind = getattr(config.peft_type, "value", "this kind")
        raise CheckpointError(
            f"The adapter {adapter!r} ({kind}) cannot be exported from a wrapped model: peft computes its tensors from "
            f"the whole model. {_BUILD_AGAIN} save_pretrained."
        )
    # A model after `add_adapter` is not inside a PeftModel, but its files must load into one.
    prefix = "" if _is_peft_model(root) else _PREFIX
    return {prefix + name: own[id(tensor)] for name, tensor in chosen.items()}


def _as_stored(name: str, weight: Weight, mesh: DeviceMesh) -> Source:
    def read(dtype: torch.dtype) -> torch.Tensor:
        # A copy: one tensor may be written under two names.
        return whole_weight(weight, mesh, dtype).clone(memory_format=torch.contiguous_format)

    return replace(source_of(weight, name, mesh), is_parameter=False, read=read)  # only parameters are cast


def _save_adapter_config(root: Any, adapter: str, folder: Path) -> None:
    """Write `adapter_config.json` as peft's `save_pretrained` does. The model's own config is not changed."""
    config = copy.copy(root.peft_config[adapter])
    base = _base_of(root)
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = vars(base).get("name_or_path") or None
    classes = type(base).__mro__
    name = next(cls for cls in classes if not issubclass(cls, FSDPModule))  # fully_shard has made a subclass
    mapping = {"base_model_class": name.__name__, "parent_library": name.__module__}
    config.save_pretrained(folder, auto_mapping_dict=mapping if config.task_type is None else None)


@dataclass(slots=True)
class _Layer:
    """A layer of peft, with adapters, that has replaced a module of the base model."""

    fqn: str
    """FQN of the replaced module in the base model."""
    module: nn.Module
    merged: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name in the replaced module -> merged tensor that was not read yet."""


class _Merge:
    """Provides the tensors of a base model with one adapter merged: see [Note: One layer at a time]."""

    def __init__(self, root: nn.Module, adapter: str, mesh: DeviceMesh) -> None:
        self.is_untied = False
        """Whether two tied weights of the base model differ after the merge. Set by `sources`."""
        self._root, self._adapter, self._mesh = root, adapter, mesh
        self._weights: dict[int, Weight] = {}  # id of a tensor -> its weight
        self._last: _Layer | None = None  # the layer that was merged last

    def sources(self) -> list[Source]:
        """Return all tensors, in the order of the base model."""
        weights = find_weights(self._root)
        self._weights = {id(weight.tensor): weight for weight in weights}
        self._refuse_unmergeable()
        base = _base_of(self._root)
        if base is not self._root:
            self._refuse_shared(weights)
        modules = {file_name(fqn): module for fqn, module in base.named_modules(remove_duplicate=False)}
        layers = {layer.fqn: layer for layer in _layers(base)}
        found: dict[str, tuple[object, Source]] = {}  # name -> (key that tied names share, the tensor)
        for weight, name in ((each, name) for each in weights for name in each.names):
            own = name if base is self._root else name.removeprefix(_PREFIX)
            outer = next((fqn for fqn in _modules_around(own) if fqn in layers), None)
            if outer is None:
                found[own] = id(weight.tensor), self._unmerged(own, weight, modules[own.rpartition(".")[0]])
            elif not any(own.startswith(f"{outer}.") for own in found):
                found.update(self._of_layer(layers[outer]))
        return list(self._untied(base, found))

    def _refuse_unmergeable(self) -> None:
        root: Any = self._root
        config = root.peft_config[self._adapter]
        check = getattr(getattr(root, "base_model", None), "_check_merge_allowed", None)
        if config.is_prompt_learning:
            raise CheckpointError(
                f"The adapter {self._adapter!r} cannot be merged: it changes the input, not weights. "
                f"{_BUILD_AGAIN} save_pretrained."
            )
        problem = ""
        if check is not None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # it warns about tied weights, which are untied here
                    check()
            except ValueError as error:
                problem = str(error)
        if problem:
            raise CheckpointError(
                f"The adapter {self._adapter!r} cannot be merged: {problem}. Call export_adapter instead."
            )

    def _refuse_shared(self, weights: list[Weight]) -> None:
        """Refuse adapters with tensors outside of their layers (VeRA): such a layer cannot be merged alone."""
        name = next((each for weight in weights for each in weight.names if not each.startswith(_PREFIX)), None)
        if name is not None:
            raise CheckpointError(
                f"The adapter {self._adapter!r} ({self._kind()}) cannot be merged layer by layer: its layers share "
                f"{name}. {_BUILD_AGAIN} merge_and_unload."
            )

    def _kind(self) -> str:
        root: Any = self._root
        return str(getattr(root.peft_config[self._adapter].peft_type, "value", "this kind"))

    def _of_layer(self, layer: _Layer) -> Iterator[tuple[str, tuple[object, Source]]]:
        """Yield the tensors of the module that a layer replaced: merged, or unchanged if the adapter is not in it."""
        replaced, tuner = _parts(layer, self._adapter)
        for key, tensor in live_state(replaced).items():
            name, owner = f"{layer.fqn}.{file_name(key)}", replaced.get_submodule(key.rpartition(".")[0])
            if tuner is None or not isinstance(tensor, nn.Parameter):
                yield name, (id(tensor), self._unmerged(name, self._weights[id(tensor)], owner))
                continue
            form = _unquantized(owner) if key.rpartition(".")[2] == "weight" else None
            shape, dtype = form or (tuple(tensor.shape), tensor.dtype)
            read = partial(self._read_merged, layer, key, name)
            yield name, ((layer.fqn, key), Source(name=name, shape=shape, dtype=dtype, is_parameter=True, read=read))

    def _unmerged(self, name: str, weight: Weight, owner: nn.Module) -> Source:
        form = _unquantized(owner) if name.rpartition(".")[2] == "weight" else None
        if form is not None:
            read = partial(self._read_dequantized, name, weight, owner)
            return Source(name=name, shape=form[0], dtype=form[1], is_parameter=True, read=read)
        return source_of(weight, name, self._mesh)

    def _read_merged(self, layer: _Layer, key: str, name: str, dtype: torch.dtype) -> torch.Tensor:
        if key not in layer.merged:
            if self._last is not None:
                self._last.merged.clear()
            self._last = layer
            whole = _Layer(layer.fqn, _copy_with(layer.module, self._whole))
            try:
                layer.merged = _merged_tensors(whole, self._adapter)
            except NotImplementedError as error:  # Lily, on all ranks
                raise CheckpointError(
                    f"The adapter {self._adapter!r} ({self._kind()}) cannot be merged: peft does not implement it. "
                    "Call export_adapter instead."
                ) from error
        return _cast(name, layer.merged.pop(key), dtype)

    def _read_dequantized(self, name: str, weight: Weight, owner: nn.Module, dtype: torch.dtype) -> torch.Tensor:
        return _cast(name, _dequantized(_packed(self._whole(weight.tensor), owner)), dtype)

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a whole copy of a parameter, in its own dtype."""
        return whole_weight(self._weights[id(tensor)], self._mesh, tensor.dtype).clone()

    def _untied(self, base: nn.Module, found: dict[str, tuple[object, Source]]) -> Iterator[Source]:
        """Yield the tensors to write. Tied ones are written once, under the name that `from_pretrained` reads."""
        tied = getattr(base, "all_tied_weights_keys", None)  # of transformers: {name: the name it is tied to}
        seen: set[object] = set()
        for name, (common, source) in found.items():
            target = (tied or {}).get(name)
            if target in found:
                if found[target][0] == common:
                    continue
                self.is_untied = True
            if tied is None and source.is_parameter:
                if common in seen:
                    continue
                seen.add(common)
            yield source


def _layers(module: nn.Module, fqn: str = "") -> Iterator[_Layer]:
    """Yield the outermost modules with adapters."""
    layer_class = import_module("peft.tuners.tuners_utils").BaseTunerLayer
    if isinstance(module, layer_class) or hasattr(module, "unload_and_optionally_merge_module"):
        yield _Layer(file_name(fqn), module)
        return
    for name, child in module.named_children():
        yield from _layers(child, f"{fqn}.{name}" if fqn else name)


def _modules_around(name: str) -> Iterator[str]:
    """Yield the FQNs of the modules around a tensor, outermost first."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))


def _parts(layer: _Layer, adapter: str) -> tuple[nn.Module, Any]:
    """Return the module that replaces a layer after the merge, and peft's layer that merges into it, or None."""
    module: Any = layer.module
    if hasattr(module, "token_adapter"):  # single rows of an embedding are trained
        module = module.token_adapter
    elif hasattr(module, "modules_to_save"):  # a trained copy for each adapter
        is_trained = adapter in module.modules_to_save
        module = module.modules_to_save[adapter] if is_trained else module.original_module
        if not hasattr(module, "base_layer"):
            return module, None
    elif hasattr(module, "unload_and_optionally_merge_module"):
        raise CheckpointError(
            f"{layer.fqn} is a {type(module).__name__} of peft, which export_merged cannot merge. {_BUILD_AGAIN} "
            "merge_and_unload."
        )
    has_adapter = any(adapter in key.split(".") for key in module.state_dict(keep_vars=True))
    return module.get_base_layer(), module if has_adapter else None


def _merged_tensors(layer: _Layer, adapter: str) -> dict[str, torch.Tensor]:
    """Merge an adapter into a layer of whole tensors. Return those of the module that the layer replaced."""
    replaced, tuner = _parts(layer, adapter)
    if _unquantized(replaced) is None:
        tuner.merge(adapter_names=[adapter])
        replaced = tuner.get_base_layer()  # LN tuning replaces the base layer
    else:
        _merge_4bit(replaced, tuner, adapter)
    return {key: tensor for key, tensor in replaced.state_dict().items() if isinstance(tensor, torch.Tensor)}


def _merge_4bit(base: Any, tuner: Any, adapter: str) -> None:
    """Merge like peft's `Linear4bit.merge`, but leave the merged weight dequantized."""
    if not hasattr(tuner, "lora_variant"):
        raise CheckpointError(
            f"{type(tuner).__name__} of peft on a 4-bit base cannot be merged: export_merged merges LoRA and DoRA "
            "there. Call export_adapter instead."
        )
    weight, variant = _dequantized(base.weight), tuner.lora_variant.get(adapter)
    merged = weight + tuner.get_delta_weight(adapter) if variant is None else variant.merge_safe(tuner, adapter, weight)
    if tuner.lora_bias[adapter]:
        base.bias.data = base.bias.data + tuner.lora_B[adapter].bias
    base.weight = nn.Parameter(merged, requires_grad=False)


def _copy_with(module: nn.Module, whole: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a copy of a module and its submodules, without hooks, with `whole(parameter)` for each parameter."""
    classes = type(module).__mro__
    new: Any = object.__new__(next(cls for cls in classes if not issubclass(cls, FSDPModule)))
    own = {name: value for name, value in vars(module).items() if not (callable(value) or name.endswith("_hooks"))}
    vars(new).update(vars(nn.Module()))
    vars(new).update({name: copy.copy(v) if isinstance(v, dict | list | set) else v for name, v in own.items()})
    for name, parameter in module._parameters.items():
        if parameter is not None:
            values = whole(parameter)
            is_packed = name == "weight" and _unquantized(module) is not None
            new._parameters[name] = _packed(values, module) if is_packed else nn.Parameter(values, requires_grad=False)
    for name, child in module.named_children():
        if isinstance(child, Holder):
            delattr(new, name)
        else:
            new.add_module(name, _copy_with(child, whole))
    return new  # type: ignore[no-any-return]


def _unquantized(module: nn.Module) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Return shape and dtype of the dequantized weight of a 4-bit module of bitsandbytes; None for other modules."""
    state = getattr(module, "quant_state", None)
    return None if state is None else (tuple(state.shape), state.dtype)


def _packed(values: torch.Tensor, module: Any) -> nn.Parameter:
    """Return a 4-bit weight of bitsandbytes from its packed values and its module."""
    state = module.quant_state
    parameter: nn.Parameter = import_module("bitsandbytes.nn").Params4bit(
        values,
        requires_grad=False,
        quant_state=state,
        blocksize=state.blocksize,
        compress_statistics=state.nested,
        quant_type=state.quant_type,
        quant_storage=values.dtype,
        bnb_quantized=True,
    )
    return parameter


def _dequantized(weight: Any) -> torch.Tensor:
    values: torch.Tensor = import_module("bitsandbytes.functional").dequantize_4bit(weight.data, weight.quant_state)
    return values


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a merged tensor, which all ranks hold. Raises CheckpointError if a finite value would become infinite."""
    largest = overflow(tensor, dtype)
    refuse_overflows({} if largest is None else {name: largest}, dtype)
    return tensor.to(dtype)

"""Adapters of peft: `export_adapter` writes one from a wrapped model, `load_adapter` reads one into it.

The files are those of peft. Merge an adapter in one process: `PeftModel.from_pretrained(...).merge_and_unload()`.
"""

import copy
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeroamp.policies.errors import CheckpointError, some_of
from zeroamp.rank_group import RankGroup
from zeroamp.weights.buckets import one_by_one, whole_weights
from zeroamp.weights.export import gather_weights
from zeroamp.weights.files import ADAPTER_STEM, exports_of, tensors_of_file, write_weights
from zeroamp.weights.layouts import joins_tensors, outline_of_model, publish
from zeroamp.weights.load import Found, fill_weights
from zeroamp.weights.model_weights import find_weights
from zeroamp.weights.stream import reading
from zeroamp.wrapping.state import WrapState, wrap_state


def export_adapter(model: nn.Module, folder: str | os.PathLike[str], adapter: str | None = None) -> Path:
    """Write one adapter of a wrapped model, for `PeftModel.from_pretrained`. All ranks call it.

    The files are those of peft's `save_pretrained`: `adapter_model.safetensors` and `adapter_config.json`, with the
    tensors of `modules_to_save`. Tensors are written in the dtype of their shards: fp32 for trained ones. They are
    all-gathered one by one, and the first rank writes. An earlier adapter in the folder is replaced once the new one is
    complete.

    Args:
        model: a `PeftModel` that `wrap_model` returned. Call this between two optimizer steps.
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
    root, mesh = state.root, state.axes.whole
    ranks = RankGroup.for_saving(mesh)
    ranks.refuse_different("export_adapter", lambda: {"folder": str(folder), "adapter": _adapter_of(root, adapter)})
    name = _adapter_of(root, adapter)
    path = Path(folder) if name == "default" else Path(folder) / name
    # One rank decides for all, since peft may look up the base model's config in a hub.
    names = ranks.on_first(lambda: _adapter_names(root, name))
    by_name = {each: weight for weight in find_weights(root) for each in weight.names}
    tensors = gather_weights("export_adapter", {written: by_name[own] for written, own in names.items()}, mesh)
    write_config = partial(_save_adapter_config, root, name)
    writer = write_weights(tensors, path, write_config, sys.maxsize, ADAPTER_STEM)  # peft reads a single file
    while ranks.on_first(lambda: next(writer, False)):
        pass
    return path


def iter_merged_weights(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, *, bucket_bytes: int = 512 * 2**20
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of the base model with the active LoRA adapters merged into its weights.

    As `zeroamp.iter_weights(model, dtype)` of the base model, with published names. A merged weight is computed in
    fp32, W + scaling * B @ A, and rounded once to `dtype`. The factors of all layers exist whole meanwhile.

    Raises:
        CheckpointError: an adapter is not plain LoRA of Linear layers (DoRA, embeddings, biases, quantized weights), or
            the model has `modules_to_save`.
        StepError: inside an optimizer step.
        WrapError: the model is not wrapped.
    """
    state = wrap_state(model)
    call = "iter_merged_weights"
    return reading(state, call, _merged(call, state, dtype, bucket_bytes))


def _merged(call: str, state: WrapState, dtype: torch.dtype, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    root: Any = state.root
    _adapter_of(root, None)
    mesh, prefix = state.axes.whole, "base_model.model."
    layers = {name: module for name, module in root.named_modules() if hasattr(module, "lora_A")}
    weights = find_weights(root)
    by_name = {each: weight for weight in weights for each in weight.names}
    factors = {name: weight for name, weight in by_name.items() if ".lora_" in name}
    for name, layer in layers.items():
        is_plain = isinstance(layer.get_base_layer(), nn.Linear) and not layer.lora_variant
        if not is_plain or any(layer.lora_bias.values()) or hasattr(layer.get_base_layer().weight, "quant_state"):
            raise CheckpointError(
                f"{name} has an adapter other than plain LoRA of a Linear. Write it by export_adapter, and merge it in "
                "one process (docs/peft.md)."
            )
    if any(".modules_to_save." in name for name in by_name):
        raise CheckpointError("The model has modules_to_save, which are not merged. Write it by export_adapter.")
    whole = {
        name: each
        for part in whole_weights(call, factors.items(), mesh, None, bucket_bytes)
        for name, each in part.items()
    }

    def merged(name: str, tensor: torch.Tensor) -> torch.Tensor:
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        if layer is None or not name.endswith(".weight"):
            return tensor.to(dtype) if tensor.is_floating_point() and by_name[name].is_parameter else tensor
        result = tensor.float()
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A:
                of_layer = name.removesuffix("base_layer.weight")
                a, b = (whole[f"{of_layer}lora_{each}.{adapter}.weight"].float() for each in "AB")
                delta = (b @ a) * layer.scaling[adapter]
                result = result + (delta.T if layer.fan_in_fan_out else delta)
        return result.to(dtype)

    base = root.get_base_model()
    outline = outline_of_model(base)
    tied = getattr(base, "all_tied_weights_keys", {})
    own = []
    for weight in weights:
        names = [name for name in weight.names if name not in factors]
        own += [(name, weight) for name in names if name.removeprefix(prefix) not in tied][:1]
    for tensors in whole_weights(call, own, mesh, None, bucket_bytes, by_layer=joins_tensors(outline)):
        made = {}
        for name, tensor in one_by_one(tensors):
            made[name.removeprefix(prefix).replace(".base_layer.", ".")] = merged(name, tensor)
        publish(outline, made)
        yield from one_by_one(made)


def load_adapter(model: nn.Module, folder: str | os.PathLike[str], adapter: str | None = None) -> None:
    """Fill one adapter of a wrapped model from the files of `export_adapter` or peft's `save_pretrained`.

    All ranks call it, and each reads its own part. The base model is not changed. Only tensors are read: the adapter
    keeps the config that it has in the model.

    Args:
        model: a `PeftModel` that `wrap_model` returned, with the adapter to fill.
        folder: a folder with `adapter_model.safetensors`, such as `export_adapter` returned.
        adapter: name of the adapter in the model. None: the active one.

    Raises:
        CheckpointError: on all ranks. There is no such file or adapter, or `zeroamp.load_hf` raises it.
        WrapError: the model is not wrapped.
    """
    state = wrap_state(model)
    path = Path(folder).absolute() / f"{ADAPTER_STEM}.safetensors"

    def find(stack: ExitStack) -> Found:
        names = _adapter_names(state.root, _adapter_of(state.root, adapter))
        by_name = {each: weight for weight in find_weights(state.root) for each in weight.names}
        stored = tensors_of_file(path, stack)
        return {name: by_name[own] for name, own in names.items()}, stored, exports_of(stored)

    fill_weights(find, state.mesh, path)


def _adapter_of(root: nn.Module, asked: str | None) -> str:
    """Return the name of the adapter: the one asked for, or the active one."""
    if not isinstance(root, import_module("peft").PeftModel):
        raise CheckpointError(
            f"{type(root).__name__} is not a PeftModel. Call peft.get_peft_model before zeroamp.wrap_model; "
            "zeroamp.export_hf writes a model without adapters."
        )
    name: Any = root.active_adapter if asked is None else asked
    if name not in root.peft_config:
        raise CheckpointError(
            f"The model has no adapter {name!r}. It has {some_of(list(root.peft_config))}: pass one of them."
        )
    return str(name)


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
            "the whole model. Build the model again, load the whole state dict into it (docs/recipes.md), and call its "
            "save_pretrained."
        )
    return {name: own[id(tensor)] for name, tensor in chosen.items()}


def _save_adapter_config(root: Any, adapter: str, folder: Path) -> None:
    """Write `adapter_config.json` as peft's `save_pretrained` does. The model's own config is not changed."""
    config = copy.copy(root.peft_config[adapter])
    base = root.get_base_model()
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = vars(base).get("name_or_path") or None
    # fully_shard has made a subclass.
    name = next(cls for cls in type(base).__mro__ if not issubclass(cls, FSDPModule))
    mapping = {"base_model_class": name.__name__, "parent_library": name.__module__}
    config.save_pretrained(folder, auto_mapping_dict=mapping if config.task_type is None else None)

"""Adapters of peft: `export_adapter` writes one from a wrapped model, `load_adapter` reads one into it.

The files are those of peft. Merge an adapter in one process: `PeftModel.from_pretrained(...).merge_and_unload()`.
"""

import copy
import os
import sys
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeroamp.policies.errors import CheckpointError, some_of
from zeroamp.rank_group import RankGroup
from zeroamp.weights.export import gather_weights
from zeroamp.weights.files import ADAPTER_STEM, tensors_of_file, write_weights
from zeroamp.weights.load import Found, fill_weights
from zeroamp.weights.model_weights import find_weights
from zeroamp.wrapping.state import wrap_state


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
    tensors = gather_weights({written: by_name[own] for written, own in names.items()}, mesh)
    write_config = partial(_save_adapter_config, root, name)
    writer = write_weights(tensors, path, write_config, sys.maxsize, ADAPTER_STEM)  # peft reads a single file
    while ranks.on_first(lambda: next(writer, False)):
        pass
    return path


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
        return {name: by_name[own] for name, own in names.items()}, tensors_of_file(path, stack)

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

"""`from_pretrained`: builds and wraps a model, and each rank reads only its own part of the files."""

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from zeroamp.planning.mesh import is_first_rank
from zeroamp.policies.errors import WrapError, some_of
from zeroamp.policies.policy import Policy
from zeroamp.weights.load import fill_from_files
from zeroamp.wrapping.state import wrap_state
from zeroamp.wrapping.wrap import wrap_model

logger = logging.getLogger("zeroamp")
_FILES = "_zeroamp_files"
"""Attribute of a model on the meta device: the folder of its weights."""
_HUB = ("revision", "cache_dir", "token", "local_files_only")
_NUM_NAMES = 5


def from_pretrained(
    model_class: type[Any],
    pretrained_model_name_or_path: str | os.PathLike[str],
    policy: Policy | None = None,
    *,
    wrap_arguments: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Build a model on the meta device, wrap it, and let each rank read its own part of the files. All ranks call it.

    No rank holds the whole model, in CPU memory or on its device. Tensors that the files lack are initialised by the
    model's own rules, equally on all ranks. A warning names them, and tensors in the files that the model lacks.

    ```python
    model = from_pretrained(AutoModelForCausalLM, "path/or/name", policy)  # wrapped and filled, for a loop of your own
    model = from_pretrained(AutoModelForCausalLM, "path/or/name")  # on the meta device, for a ZeroampTrainer
    ```

    Args:
        model_class: `AutoModelForCausalLM`, another Auto class, or a model's class.
        pretrained_model_name_or_path: a folder, or a name in the hub. Its files must be safetensors.
        policy: for `wrap_model`. None: the model is returned on the meta device, for a Trainer that wraps and fills it.
        wrap_arguments: more arguments of `zeroamp.wrap_model`.
        kwargs: config; revision, cache_dir, token and local_files_only of the hub; and those of transformers'
            `from_config`: dtype, attn_implementation, trust_remote_code. Trained parameters become fp32 in
            `wrap_model`, whatever `dtype` is.

    Raises:
        CheckpointError: `zeroamp.load_hf` raises it. Missing and unexpected names are not errors.
        WrapError: the files are quantized, or `zeroamp.wrap_model` raises it.
    """
    config = kwargs.pop("config", None)
    hub = {name: kwargs.pop(name) for name in _HUB if name in kwargs}
    folder = _folder(pretrained_model_name_or_path, hub)
    if config is None:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=kwargs.get("trust_remote_code"))
    if getattr(config, "quantization_config", None) is not None:
        raise WrapError(
            f"The files of {pretrained_model_name_or_path} are quantized, and packed weights cannot be read in parts. "
            "Load the model with transformers' from_pretrained, then wrap it."
        )
    model = _on_meta(model_class, config, kwargs)
    if (folder / GENERATION_CONFIG_NAME).exists() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    setattr(model, _FILES, folder)
    if policy is not None:
        wrap_model(model, policy, **dict(wrap_arguments or {}))
        fill_deferred(model)
    return model


def _folder(name: str | os.PathLike[str], hub: Mapping[str, Any]) -> Path:
    if os.path.isdir(name):
        return Path(name)
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "model*.safetensors", "*.py"]
    return Path(snapshot_download(os.fspath(name), allow_patterns=patterns, **hub))  # ranks of a node wait for a lock


def _on_meta(model_class: type[Any], config: Any, kwargs: Mapping[str, Any]) -> PreTrainedModel:
    given = {name: value for name, value in kwargs.items() if value is not None}
    if given.get("dtype") == "auto":
        del given["dtype"]
    is_class_of_model = issubclass(model_class, PreTrainedModel)
    if is_class_of_model:
        given.pop("trust_remote_code", None)
    build = model_class._from_config if is_class_of_model else model_class.from_config
    with torch.device("meta"):
        return build(config, **given).eval()


def fill_deferred(model: nn.Module) -> None:
    """Fill a wrapped model that `from_pretrained` built on the meta device, once, and log what its files lack.

    Raises:
        CheckpointError: see `from_pretrained`.
    """
    folder = getattr(model, _FILES, None)
    if folder is None:
        return
    others = fill_from_files(model, folder, strict=False)
    delattr(model, _FILES)
    missing = _not_ignored(others.missing, getattr(model, "_keys_to_ignore_on_load_missing", None))
    unexpected = _not_ignored(others.unexpected, getattr(model, "_keys_to_ignore_on_load_unexpected", None))
    if not is_first_rank(wrap_state(model).axes.whole):
        return
    if missing:
        logger.warning(
            "%s lacks %d tensors of the model, which were initialised instead: %s. Train them before you use them.",
            *(folder, len(missing), some_of(missing, _NUM_NAMES)),
        )
    if unexpected:
        logger.warning(
            "%s has %d tensors that the model does not have. They were not read: %s.",
            *(folder, len(unexpected), some_of(unexpected, _NUM_NAMES)),
        )


def refuse_unfilled(model: nn.Module) -> None:
    """Raise WrapError if `from_pretrained` built a submodule of `model` without filling it: only roots are filled."""
    inner = next((fqn for fqn, module in model.named_modules() if fqn and hasattr(module, _FILES)), None)
    if inner is not None:
        raise WrapError(
            f"{inner}, inside a {type(model).__name__}, is on the meta device and its files were not read. Load it "
            "with transformers' from_pretrained before you put it into another model (as peft does)."
        )


def _not_ignored(names: list[str], patterns: list[str] | None) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]

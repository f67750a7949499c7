"""`export_hf`: gathers the weights of a wrapped model on the first rank, which writes them as safetensors."""

import copy
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.planning.mesh import is_first_rank
from zeroamp.policies.dtypes import DTYPE_BY_NAME, short_name
from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.policies.numbers import is_integer
from zeroamp.rank_group import RankGroup
from zeroamp.weights.buckets import whole_weights
from zeroamp.weights.files import require_libraries, write_weights
from zeroamp.weights.layouts import outline_of_model, publish
from zeroamp.weights.model_weights import Weight, find_weights
from zeroamp.wrapping.state import models_of, refuse_single_part, wrap_state

_BUCKET_BYTES = 64 * 2**20
"""Bytes that are all-gathered together."""


def export_hf(
    model: nn.Module,
    folder: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    *,
    max_shard_bytes: int = 5 * 1000**3,
) -> None:
    """Write the weights of a wrapped model to `folder` as safetensors that `from_pretrained` reads. All ranks call it.

    Names and shapes are those of the model's `state_dict()`, and tied parameters are written once. A transformers model
    is written as by its `save_pretrained`: in its published layout, with `config.json` and `generation_config.json`. If
    the folder exists, the weights of an earlier export are replaced when the new ones are complete; other files stay.

    The first rank holds all weights in CPU memory, in the dtype of the files. Shards are cast before they are
    all-gathered.

    Args:
        model: a model that `wrap_model` returned, at any stage, before training, between two steps or after. Or
            `PipelineStep.model`: the weights of all stages are written.
        folder: a folder that the first rank sees. It is created if it does not exist.
        dtype: dtype of floating-point parameters: "fp32", "bf16", "fp16" or a torch dtype. None: the config's low dtype
            if it sets `stage3_gather_16bit_weights_on_model_save`, else fp32. Buffers keep their dtype. Of buffers and
            of `ignored_params`, the first rank's values are written.
        max_shard_bytes: the largest number of bytes of tensors in one file. A larger tensor gets its own file.

    Raises:
        CheckpointError: on all ranks. Before anything is written: the model has adapters of peft or weights that
            bitsandbytes quantized, the ranks pass different arguments, a finite value would be infinite in `dtype`,
            the folder is a checkpoint, `max_shard_bytes` is no positive integer, or safetensors is not installed.
            Later: the first rank cannot write.
        WrapError: the model is not wrapped, or is one part of a pipeline.
    """
    state = wrap_state(model)
    refuse_single_part(state, "export_hf")
    root, mesh, models = state.root, state.axes.whole, models_of(state)
    ranks = RankGroup.for_saving(mesh, "export_hf")
    written_dtype = partial(_export_dtype, dtype, state.plan.policy.export_dtype)
    weights: dict[str, Weight] = {}

    def check() -> dict[str, object]:
        require_libraries()
        if not is_integer(max_shard_bytes, at_least=1):
            raise CheckpointError(
                f"export_hf(max_shard_bytes=) must be an integer from 1 on, but is {max_shard_bytes!r}."
            )
        for each in models:
            _refuse_modules(each)
        weights.update((name, weight) for weight in find_weights(root) for name in weight.written_names)
        for name, weight in weights.items():
            _refuse_overflow(name, weight, written_dtype())
        return {"folder": os.fspath(folder), "dtype": written_dtype()}

    ranks.refuse_different("export_hf", check)
    if state.axes.is_joined:
        from zeroamp.weights.stages import weights_of_stages

        dtype = written_dtype()
        buckets = weights_of_stages("export_hf", state, dtype, _BUCKET_BYTES, is_published=True, to_all=False)
        tensors = _in_cpu_memory(buckets, mesh)
    else:
        tensors = gather_weights("export_hf", weights, mesh, written_dtype())
        ranks.on_first(lambda: publish(outline_of_model(root), tensors))
    write_config = partial(_save_config, models[0], dtype=written_dtype())
    writer = write_weights(tensors, Path(folder), write_config, max_shard_bytes)
    while ranks.on_first(lambda: next(writer, False)):
        pass


def _refuse_modules(root: nn.Module) -> None:
    """Raise CheckpointError for modules whose weights `from_pretrained` does not load: peft's and bitsandbytes'."""
    for fqn, module in root.named_modules():
        if any(cls.__module__.startswith("peft.") for cls in type(module).__mro__):
            raise CheckpointError(
                f"export_hf cannot write {type(root).__name__}: {fqn or 'the model'} is a peft module, and "
                "from_pretrained cannot load the names of adapters and of the layers that they wrap. Call "
                "zeroamp.integrations.peft: export_adapter(model, folder) writes an adapter, which peft merges in one "
                "process (docs/peft.md)."
            )
        if getattr(module, "quant_state", None) is not None:  # its scales are not among the parameters
            raise CheckpointError(
                f"export_hf cannot write {fqn}.weight: it is quantized by bitsandbytes. "
                "zeroamp.integrations.peft.export_adapter writes adapters."
            )


def _refuse_overflow(name: str, weight: Weight, dtype: torch.dtype) -> None:
    """Raise CheckpointError if a finite value of a weight would be infinite in an export as `dtype`."""
    local, written = weight.local, weight.dtype_in(dtype)
    if written != local.dtype and (beyond := local.to(written).isinf() & local.isfinite()).any():
        raise CheckpointError(
            f"{name} has a value of magnitude {float(local[beyond].abs().max()):g}, but the largest number of "
            f"{short_name(written)} is {torch.finfo(written).max:g}. Export in fp32, or, if the model was trained in "
            "it, in bf16."
        )


def gather_weights(
    call: str, weights: Mapping[str, Weight], mesh: DeviceMesh, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Return whole weights by name, in CPU memory of the first rank. All ranks of `mesh` call it; others get {}.

    Parameters are cast to `dtype`, unless it is None. Raises as `whole_weights`.
    """
    return _in_cpu_memory(whole_weights(call, weights.items(), mesh, dtype, _BUCKET_BYTES), mesh)


def _in_cpu_memory(buckets: Iterable[dict[str, torch.Tensor]], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Return the tensors of all buckets on the first rank, in CPU memory, and {} on others."""
    found: dict[str, torch.Tensor] = {}
    for bucket in buckets:
        if is_first_rank(mesh):
            for name, whole in bucket.items():
                found[name] = whole.to("cpu", copy=True, memory_format=torch.contiguous_format)
        bucket.clear()
    return found


def _save_config(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write the config files that `from_pretrained` needs, if `model` is a transformers model."""
    outline = outline_of_model(model)  # of the class that fully_shard has replaced by a subclass
    if outline is None:
        return
    config = copy.deepcopy(model.config)  # the model's own config is not changed
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(outline).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _export_dtype(requested: str | torch.dtype | None, default: torch.dtype) -> torch.dtype:
    """Return `requested` as a torch dtype, or `default` for None.

    Raises:
        CheckpointError: `requested` is not fp32, bf16 or fp16.
    """
    named = DTYPE_BY_NAME.get(requested, requested) if isinstance(requested, str) else requested
    dtype = default if named is None else named
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_BY_NAME.values():
        valid = '"fp32", "bf16" or "fp16"'
        raise CheckpointError(describe("the dtype of an export", repr(requested), valid, "Pass one of them."))
    return dtype

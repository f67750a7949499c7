"""Saves and loads the inner tensors of optimizer state in tensor subclasses, such as torchao's 8-bit states.

A scale belongs to a block of one rank's shard, so the inner tensors must be loaded by as many ranks as saved them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zeroamp.planning.mesh import local_part
from zeroamp.policies.errors import CheckpointError


def subclass_part(value: object) -> torch.Tensor | None:
    """Return this rank's part of a tensor subclass with inner tensors, or None for any other value."""
    with torch.no_grad():
        local = local_part(value) if isinstance(value, torch.Tensor) else None
    return local if hasattr(type(local), "__tensor_flatten__") else None


def describe_subclass(local: torch.Tensor, where: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the inner tensors by attribute, and a description to rebuild the tensor: class, parts and context.

    Raises:
        CheckpointError: torch does not list the class as safe (`torch.serialization.add_safe_globals`).
    """
    name = f"{type(local).__module__}.{type(local).__qualname__}"
    _class_of(name, where)
    parts, context = local.__tensor_flatten__()  # type: ignore[attr-defined]
    return {part: getattr(local, part) for part in parts}, {"class": name, "parts": list(parts), "context": context}


def build_subclass(
    kind: Mapping[str, Any], parts: dict[str, torch.Tensor], parameter: torch.Tensor, where: str
) -> torch.Tensor:
    """Return the tensor that `describe_subclass` described, sharded like `parameter` if that is sharded.

    Raises:
        CheckpointError: the class is not imported in this process, or the parameter's shard has another shape.
    """
    parts = {name: part.to(parameter.device) for name, part in parts.items()}
    local: torch.Tensor = _class_of(kind["class"], where).__tensor_unflatten__(parts, kind["context"], None, None)
    if not isinstance(parameter, DTensor):
        return local
    with torch.no_grad():
        own_shape = local_part(parameter).shape
    if local.shape != own_shape:
        raise CheckpointError(
            f"{where} has shards of shape {tuple(local.shape)}, but this rank's shard is {tuple(own_shape)}. Start "
            "as many ranks with the same zeroamp.shard_dim, or load the model alone: load_checkpoint(folder, model)."
        )
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _class_of(name: str, where: str) -> Any:
    """Return a class by its name, if it is one of torch's safe globals."""
    known = [entry[0] if isinstance(entry, tuple) else entry for entry in torch.serialization.get_safe_globals()]
    for cls in known:
        if f"{cls.__module__}.{cls.__qualname__}" == name and hasattr(cls, "__tensor_unflatten__"):
            return cls
    raise CheckpointError(
        f"{where} is a {name}, which torch.serialization.get_safe_globals() does not list. Import the optimizer's "
        "package first. For a class of your own, call torch.serialization.add_safe_globals."
    )

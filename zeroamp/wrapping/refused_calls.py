"""Raises errors for calls on a wrapped model that would fail inside torch, or would train in another precision.

A method that is set on an instance hides the method of its class. `wrap_model` sets such methods on the model. They do
not run in a forward or in an optimizer step.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.fsdp import can_be_sharded, take_sharded_memory, units_of
from zeroamp.planning.mesh_axes import MeshAxes
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import WrapError

_REFUSED = {
    "__deepcopy__": (
        "copy.deepcopy cannot copy a wrapped model, and torch.optim.swa_utils.AveragedModel calls it. For an average "
        "of the weights, average the shards: docs/recipes.md has an example. For a second model, build and wrap one. "
        "zeroamp.unwrap_model makes the model plain again."
    ),
    "__reduce_ex__": (
        "A wrapped model, whose parameters are sharded, cannot be pickled or copied, as torch.save(model) and "
        "copy.copy do. On all ranks, call zeroamp.export_hf(model, folder) for its weights, zeroamp.save_checkpoint to "
        "go on with training, or zeroamp.unwrap_model(model) to make the model plain again."
    ),
    "resize_token_embeddings": (
        "resize_token_embeddings was called on a wrapped model, whose embeddings are sharded. Call it before "
        "wrap_model."
    ),
}
"""Name of a method -> the text of the error that it raises on a wrapped model."""


_SHARD = "zeroamp_shard"
"""Key of `_shard_of`, in the metadata of a state dict."""


def refuse_calls(model: nn.Module, axes: MeshAxes, runs_model: Callable[[], bool]) -> None:
    """Replace methods that a wrapped model cannot run by methods that raise.

    `runs_model` tells whether the model's own code runs in a forward.
    """
    for name, text in _REFUSED.items():
        replace_method(model, name, partial(_raising, text))
    replace_method(model, "save_pretrained", _save_pretrained)
    moves = _Moves(model, runs_model)
    for fqn, module in model.named_modules():
        if isinstance(module, FSDPModule):
            replace_method(module, "_apply", partial(_same_dtypes, model.get_submodule(fqn), fqn, moves))
    # Not a pre-hook of load_state_dict: FSDP2's own pre-hook, which reshards the root's parameters, runs before it.
    shard = _shard_of(axes)
    replace_method(model, "_load_from_state_dict", partial(_own_shards_only, model, shard))
    if shard is not None:
        model.register_state_dict_post_hook(partial(_record_shard, shard))  # type: ignore[no-untyped-call]


def replace_method(module: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a module's method `name` by `make(method)`. Skip modules without it, or with one on the instance."""
    if hasattr(module, name) and name not in vars(module):
        setattr(module, name, make(getattr(module, name)))


def _raising(text: str, _method: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise WrapError(text)

    return refuse


def _save_pretrained(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `save_pretrained` of transformers and peft that raises unless it is given a `state_dict`."""

    @wraps(method)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None:
            raise WrapError(
                "save_pretrained was called on a wrapped model, whose parameters are sharded. Call "
                "zeroamp.export_hf(model, folder) on all ranks; from_pretrained can read the folder. For a model with "
                "adapters, zeroamp.integrations.peft.export_adapter(model, folder) writes an adapter."
            )
        return method(*args, **kwargs)

    return save_pretrained


class _Moves:
    """Makes all groups use the new memory of their parameters after `nn.Module._apply` (`.to()` and the like).

    FSDP2 does so when `_apply` reaches the module with a group's state. The parameters of a typed group belong to other
    modules, which `_apply` may reach later. So all groups do it again at the end.

    In a forward, a module that casts itself (`self.router.to(torch.float32)`) has the dtype already, and may be
    unsharded. It is not resharded then.
    """

    def __init__(self, model: nn.Module, runs_model: Callable[[], bool]) -> None:
        self._model = model
        self._is_inside = False
        self.runs_model = runs_model

    def around(self, apply: Callable[[], Any]) -> Any:
        if self._is_inside:
            return apply()
        self._is_inside = True
        try:
            for module in units_of(self._model):
                module.reshard()
            return apply()
        finally:
            self._is_inside = False
            for module in units_of(self._model):
                take_sharded_memory(module)


def _same_dtypes(unit: nn.Module, fqn: str, moves: _Moves, apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `_apply`, which `.to()`, `.half()` and others call, that raises if it would change a dtype."""

    @wraps(apply)
    def checked(fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        named = {parameter.dtype: name for name, parameter in reversed(list(unit.named_parameters()))}
        for dtype, name in named.items():
            if (other := fn(torch.empty(0, dtype=dtype)).dtype) != dtype:
                raise WrapError(
                    f"{fqn + '.' if fqn else ''}{name} is stored in {short_name(dtype)} and cannot be cast to "
                    f"{short_name(other)} after wrap_model. Set the dtype in which the model computes and communicates "
                    "in the config: bf16, fp16 or torch_autocast. Frozen parameters may be cast before wrap_model. "
                    "zeroamp.export_hf(model, folder, dtype) writes weights in another dtype."
                )
        if moves.runs_model():
            return nn.Module._apply(unit, fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        return moves.around(partial(apply, fn, *args, **kwargs))

    return checked


def _shard_of(axes: MeshAxes) -> str | None:
    """Return which shards of the parameters a rank has, in words. None if it has whole parameters."""
    shard, num_shards = axes.fsdp.get_local_rank(axes.fsdp.ndim - 1), axes.fsdp.shape[-1]
    of_data = [f"shard {shard} of {num_shards}"] * (num_shards > 1)
    tensor = [] if axes.tensor is None else [f"tensor rank {axes.tensor.get_local_rank()} of {axes.tensor.size()}"]
    return ", ".join([*of_data, *tensor]) or None


def _record_shard(
    shard: str, _model: nn.Module, _state_dict: dict[str, Any], _prefix: str, metadata: dict[str, Any]
) -> None:
    """Note in a state dict whose shards it has. `torch.save` keeps the note."""
    metadata[_SHARD] = shard


def _own_shards_only(model: nn.Module, shard: str | None, load: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `_load_from_state_dict` that raises for shards of another rank, and plain tensors of sharded parameters.

    torch loads the shard that is there, whichever rank's it is. The note of `_record_shard` is lost if the state dict
    is rebuilt, as by `dict(state_dict)`. A tensor that `torch.load` read has the coordinates of the rank that saved it.
    """

    @wraps(load)
    def checked(state_dict: Any, prefix: str, metadata: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        named = [(name, state_dict.get(prefix + name), parameter) for name, parameter in model.named_parameters()]
        saved = metadata.get(_SHARD, shard)
        pairs = ((value, own) for _, value, own in named if isinstance(value, DTensor) and isinstance(own, DTensor))
        other = next((value for value, own in pairs if _place_of(value) != _place_of(own)), None)
        if saved == shard and other is not None:
            saved = f"at {_place_of(other)} of its mesh"
        if saved != shard and any(isinstance(value, DTensor) for _, value, _ in named):
            raise WrapError(
                f"load_state_dict was given the parameters of another rank ({saved}), but this rank has "
                f"{shard or 'whole parameters'}. The state_dict() of a wrapped model has its own rank's shards, so one "
                "rank cannot save the model with torch.save. To go on with training, call zeroamp.save_checkpoint and "
                "zeroamp.load_checkpoint on all ranks. For the weights, call zeroamp.export_hf and zeroamp.load_hf."
            )
        for name, value, parameter in named:
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and can_be_sharded(parameter):
                _refuse_whole(name, parameter)
        return load(state_dict, prefix, metadata, *args, **kwargs)

    return checked


def _place_of(tensor: DTensor) -> tuple[int, ...]:
    """Return the coordinates of a shard, along the mesh dimensions over which its tensor is sharded."""
    mesh = tensor.device_mesh
    along = zip(mesh.get_coordinate() or (), mesh.shape, tensor.placements, strict=False)
    return tuple(at for at, size, placement in along if size > 1 and not placement.is_replicate())


def _refuse_whole(name: str, parameter: nn.Parameter) -> None:
    if not isinstance(parameter, DTensor):  # with tensor parallelism an unsharded parameter is a DTensor too
        raise WrapError(
            f"load_state_dict was given a whole tensor for {name}, which is unsharded: a forward with gradients has "
            "run, and its backward has not. In this state set_model_state_dict does not shard the tensor. Run the "
            "backward first, or reshard: for module in model.modules(): if isinstance(module, FSDPModule): "
            "module.reshard()"
        )
    raise WrapError(
        f"load_state_dict was given a whole tensor for {name}, which is sharded. Call torch.distributed."
        "checkpoint.state_dict.set_model_state_dict(model, state_dict, "
        "options=StateDictOptions(full_state_dict=True)) on all ranks, zeroamp.load_hf for safetensors, or "
        "load before wrap_model."
    )

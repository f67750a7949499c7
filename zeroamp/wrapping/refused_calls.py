"""Raises errors for calls on a wrapped model that would fail inside torch, or would train in another precision.

A method that is set on an instance hides the method of its class. `wrap_model` sets such methods on the model, and
`unwrap_model` removes them. They do not run in a forward or in an optimizer step.
"""

import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.fsdp import can_be_sharded, take_sharded_memory, units_of
from zeroamp.planning.mesh import TORCHFT_REMEDY
from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import WrapError
from zeroamp.wrapping.state import Removable

_REFUSED = {
    "__deepcopy__": (
        "copy.deepcopy cannot copy a wrapped model, and torch.optim.swa_utils.AveragedModel calls it. For an average "
        "of the weights (EMA), average the shards: docs/recipes.md has an example. For a second model, build and wrap "
        "one."
    ),
    "resize_token_embeddings": (
        "resize_token_embeddings was called on a wrapped model, whose embeddings are sharded. Call it before "
        "wrap_model. To change a wrapped model, call zeroamp.unwrap_model(model) first, and wrap it again."
    ),
}
"""Name of a method -> the text of the error that it raises on a wrapped model."""
_ALL_REDUCE_HOOK = f"set_all_reduce_hook was called on a wrapped model, as torchft does. {TORCHFT_REMEDY}"
_ADAPTERS = (
    "Adapters of a wrapped model cannot be added, merged or removed, because its parameters are sharded. Call "
    "get_peft_model, add_adapter and load_adapter before wrap_model. To write an adapter, or the model with an adapter "
    "merged, call zeroamp.integrations.peft.export_adapter or export_merged. To change the adapters of a wrapped "
    "model, call zeroamp.unwrap_model(model) first, and wrap it again."
)


@dataclass(frozen=True, slots=True)
class _Shadow:
    """An attribute of an instance that hides a method of its class."""

    module: nn.Module
    name: str

    def remove(self) -> None:
        """Restore the method of the class."""
        vars(self.module).pop(self.name, None)


def refuse_calls(model: nn.Module) -> Iterator[Removable]:
    """Replace methods that a wrapped model cannot run by methods that raise. Yield an object that undoes each."""
    for name, text in _REFUSED.items():
        yield from replace_method(model, name, partial(_raising, text))
    configs = _AdapterConfigs(model)
    for root in _roots_of_adapters(model):
        yield from replace_method(root, "save_pretrained", _save_pretrained)
        yield from replace_method(root, "get_submodule", partial(_get_submodule, configs))
        for name in ("merge_adapter", "delete_adapter"):
            yield from replace_method(root, name, partial(_raising, _ADAPTERS))
    moves = _Moves(model)
    for fqn, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield from replace_method(module, "set_all_reduce_hook", partial(_raising, _ALL_REDUCE_HOOK))
            yield from replace_method(module, "_apply", partial(_same_dtypes, model.get_submodule(fqn), fqn, moves))
    # Not a pre-hook of load_state_dict: FSDP2's own pre-hook, which reshards the root's parameters, runs before it.
    yield from replace_method(model, "_load_from_state_dict", partial(_shards_only, model))


def replace_method(
    module: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[Removable]:
    """Replace a module's method `name` by `make(method)`. Skip modules without it, or with one on the instance."""
    if hasattr(module, name) and name not in vars(module):
        setattr(module, name, make(getattr(module, name)))
        yield _Shadow(module, name)


def _roots_of_adapters(model: nn.Module) -> list[nn.Module]:
    """Return the modules on which peft calls `get_submodule` to replace modules: a `PeftModel` has some inside."""
    inside = ("base_model", "base_model.model")
    is_of_peft = any(cls.__module__.startswith("peft.") for cls in type(model).__mro__)
    modules = dict(model.named_modules())
    return [model, *(modules[fqn] for fqn in inside if is_of_peft and fqn in modules)]


class _AdapterConfigs:
    """The configs of a model's adapters, as they were when the model was wrapped.

    peft stores the config of a new adapter, and changes it, before it replaces modules. If replacing then raises, the
    model must have the configs of its existing adapters, because an export writes them.
    """

    def __init__(self, model: nn.Module) -> None:
        configs: Any = getattr(model, "peft_config", None)
        self._live: dict[str, Any] = configs if isinstance(configs, dict) else {}
        self._known = {name: (config, deepcopy(vars(config))) for name, config in self._live.items()}

    def restore(self) -> None:
        """Restore the configs that were stored or changed since."""
        self._live.clear()
        for name, (config, values) in self._known.items():
            config.__dict__.update(deepcopy(values))
            self._live[name] = config


def _get_submodule(configs: _AdapterConfigs, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `get_submodule` that raises if peft calls it. peft calls it for each module that it replaces."""

    @wraps(method)
    def get_submodule(*args: Any, **kwargs: Any) -> Any:
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("peft."):
            configs.restore()
            raise WrapError(_ADAPTERS)
        return method(*args, **kwargs)

    return get_submodule


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
                "adapters, zeroamp.integrations.peft.export_adapter(model, folder) writes an adapter, and "
                "export_merged(model, folder) writes the base model with the adapter merged."
            )
        return method(*args, **kwargs)

    return save_pretrained


class _Moves:
    """Makes all groups use the new memory of their parameters after `nn.Module._apply` (`.to()` and the like).

    FSDP2 does so when `_apply` reaches the module with a group's state. The parameters of a typed group belong to other
    modules, which `_apply` may reach later. So all groups do it again at the end.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_inside = False

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
        return moves.around(partial(apply, fn, *args, **kwargs))

    return checked


def _shards_only(model: nn.Module, load: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `_load_from_state_dict` that raises for plain tensors of sharded parameters."""

    @wraps(load)
    def checked(state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in model.named_parameters():
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and can_be_sharded(parameter):
                _refuse_whole(name, parameter)
        return load(state_dict, prefix, *args, **kwargs)

    return checked


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

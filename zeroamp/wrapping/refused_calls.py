"""Refuses calls on a wrapped model that would fail inside torch, or that would train in another precision.

A method set on an instance hides the method of its class. `wrap_model` sets methods that raise on the model, and
`unwrap_model` removes them. None of them runs in a forward or in an optimizer step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

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
"""Method of a model -> the text of the error that it raises on a wrapped model."""


@dataclass(frozen=True, slots=True)
class _Shadow:
    """An attribute of an instance that hides a method of its class."""

    module: nn.Module
    name: str

    def remove(self) -> None:
        """Restore the method of the class."""
        vars(self.module).pop(self.name, None)


def refuse_calls(model: nn.Module) -> Iterator[Removable]:
    """Replace the methods that a wrapped model cannot run by ones that raise. Yield what undoes each replacement."""
    for name, text in _REFUSED.items():
        yield from _shadow(model, name, partial(_raising, text))
    yield from _shadow(model, "save_pretrained", _save_pretrained)
    for fqn, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield from _shadow(module, "_apply", partial(_same_dtypes, model.get_submodule(fqn), fqn))
    yield model.register_load_state_dict_pre_hook(_refuse_unsharded)  # type: ignore[no-untyped-call]


def _shadow(module: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[_Shadow]:
    """Replace a method by `make(method)`, unless the module has none, or the user set one on the instance."""
    if hasattr(module, name) and name not in vars(module):
        setattr(module, name, make(getattr(module, name)))
        yield _Shadow(module, name)


def _raising(text: str, _method: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise WrapError(text)

    return refuse


def _save_pretrained(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' and peft's `save_pretrained` that raises unless it is given a `state_dict`."""

    @wraps(method)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None:
            raise WrapError(
                "save_pretrained was called on a wrapped model, whose parameters are sharded. Call "
                "zeroamp.export_hf(model, folder) on all ranks: from_pretrained reads what it writes. For a model with "
                "adapters, pass save_pretrained a full state_dict: docs/recipes.md has an example."
            )
        return method(*args, **kwargs)

    return save_pretrained


def _same_dtypes(unit: nn.Module, fqn: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return `nn.Module._apply`, behind `.to()`, `.half()` and others, that refuses to change a parameter's dtype."""

    @wraps(apply)
    def checked(fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        named = {parameter.dtype: name for name, parameter in reversed(list(unit.named_parameters()))}
        for dtype, name in named.items():
            if (other := fn(torch.empty(0, dtype=dtype)).dtype) != dtype:
                raise WrapError(
                    f"{fqn + '.' if fqn else ''}{name} is stored in {short_name(dtype)} and was to be cast to "
                    f"{short_name(other)} after wrap_model. The config decides the dtype in which a model computes and "
                    "communicates: set bf16, fp16 or torch_autocast there. Frozen parameters may be cast before "
                    "wrap_model. zeroamp.export_hf(model, folder, dtype) writes weights in another dtype."
                )
        return apply(fn, *args, **kwargs)

    return checked


def _refuse_unsharded(module: nn.Module, state_dict: Any, prefix: str, *_args: Any) -> None:
    """Raise if `load_state_dict` would copy plain tensors into sharded parameters. Runs as its pre-hook."""
    for name, parameter in module.named_parameters():
        value = state_dict.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            raise WrapError(
                f"load_state_dict was given a whole tensor for {name}, which is sharded. Call torch.distributed."
                "checkpoint.state_dict.set_model_state_dict(model, state_dict, "
                "options=StateDictOptions(full_state_dict=True)) on all ranks, zeroamp.load_hf for safetensors, or "
                "load before wrap_model."
            )

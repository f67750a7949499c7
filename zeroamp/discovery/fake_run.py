"""Runs a model on fake tensors, with example inputs, and restores the model exactly."""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any
from weakref import ReferenceType

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.discovery.caches import caches_restored
from zeroamp.hooks._torch.dispatch import FakeTensorMode
from zeroamp.hooks._torch.dtensor import without_wrapper
from zeroamp.hooks.random_state import preserved_random_state
from zeroamp.planning.mesh import sharded_like
from zeroamp.policies.errors import ConfigError, describe

_DICTS = (dict, OrderedDict, defaultdict)


class Replacements:
    """Copies values with their tensors replaced. Equal objects get one replacement, however often they occur."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._make = make
        # The original is retained beside its copy, so that its id is not reused.
        self._copies: dict[int, tuple[object, Any]] = {}

    def of(self, value: Any) -> Any:
        """Return `value` with its tensors replaced, in lists, tuples, dicts and sets at any depth.

        Containers are copied even if they contain no tensor: a forward that appends to a list of its module then
        appends to the copy. Objects of other types are returned as they are.
        """
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if isinstance(value, torch.Tensor):
            return self._keep(value, self._make(value))
        if type(value) in _DICTS or isinstance(value, UserDict):
            copied = self._keep(value, copy(value))
            copied.update({key: self.of(item) for key, item in value.items()})
            return copied
        if type(value) is list:
            copied = self._keep(value, [])
            copied.extend(self.of(item) for item in value)
            return copied
        if isinstance(value, tuple):
            items = [self.of(item) for item in value]
            return self._keep(value, type(value)(*items) if hasattr(value, "_fields") else tuple(items))
        return self._keep(value, copy(value)) if type(value) is set else value

    def _keep(self, value: object, copied: Any) -> Any:
        self._copies[id(value)] = (value, copied)
        return copied


def _dtype_of(tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype


@contextmanager
def fake_run(
    model: nn.Module,
    device_type: str,
    dtype_of: Callable[[torch.Tensor], torch.dtype] = _dtype_of,
    made: list[ReferenceType[torch.Tensor]] | None = None,
) -> Iterator[Replacements]:
    """Replace the tensors of `model` by fake ones inside the context, and make new tensors fake.

    Yields the replacements, with which the caller replaces the inputs. Gradients are on, and compiled modules run
    eagerly. At the end the model, the caches of its code and all random states are restored.

    Args:
        model: on any device.
        device_type: of the fake tensors.
        dtype_of: returns the dtype of a tensor's replacement, by default the tensor's own.
        made: gets a weak reference to each fake tensor, for `nothing_left`.
    """
    replacements = Replacements(lambda tensor: _fake(tensor, dtype_of(tensor), device_type))
    with (
        preserved_random_state(device_type),
        torch.inference_mode(False),
        torch.enable_grad(),
        # Compiled modules run eagerly under a dispatch mode, but with fullgraph=True torch 2.13 and 2.15 raise instead.
        torch.compiler.set_stance("force_eager"),
        FakeTensorMode(made, allow_non_fake_inputs=True),
        caches_restored(model),
        _tensors_replaced(model, replacements),
    ):
        yield replacements


def _fake(tensor: torch.Tensor, dtype: torch.dtype, device_type: str) -> torch.Tensor:
    """Return an empty tensor of the shape and strides of `tensor`. Of a DTensor, the local part is replaced."""
    if isinstance(tensor, DTensor):
        fake: torch.Tensor = sharded_like(_fake(without_wrapper(tensor.detach()), dtype, device_type), tensor)
    else:
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=device_type)
    if not isinstance(tensor, nn.Parameter):
        return fake.requires_grad_(tensor.requires_grad)
    parameter = nn.Parameter(fake, requires_grad=tensor.requires_grad)
    # Without `quant_state` bitsandbytes would make a parameter of its own class, which is not a fake tensor.
    if hasattr(tensor, "quant_state"):
        parameter.quant_state = tensor.quant_state  # type: ignore[attr-defined]
    return parameter


@contextmanager
def _tensors_replaced(model: nn.Module, replacements: Replacements) -> Iterator[None]:
    """Replace the tensors of all modules of `model` inside the context: parameters, buffers and plain attributes.

    At the end the attributes of each module are restored. So what the forward sets, reassigns or appends is undone, and
    every Parameter, buffer and container is the same object as before. References that are not in `named_parameters`
    are replaced too, such as `nn.LSTM`'s list of its weights. A module may be registered at several paths.
    """
    saved = [(module, dict(vars(module))) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for module, attributes in saved:
            vars(module).update({name: replacements.of(value) for name, value in attributes.items()})
            _cast_like_real(module)
        yield
    finally:
        for module, attributes in saved:
            vars(module).clear()
            vars(module).update(attributes)
        # A parameter that the forward reads from elsewhere, such as a closure, was not replaced and has a gradient now.
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _cast_like_real(module: nn.Module) -> None:
    """Let `module.to(...)` and the like do with fake parameters what they do with real ones: assign `parameter.data`.

    A forward may cast its own modules, as the router of transformers' Switch does. torch swaps a fake parameter with
    a new tensor instead. It refuses that if anything refers weakly to either tensor, as `FakeTensorMode` does, or if
    the forward has used the parameter before; and the parameter loses its hooks. A class with a method of its own keeps
    it, except recurrent layers: theirs renews the list of weights, which stays right here.
    """
    if type(module)._apply in (nn.Module._apply, nn.RNNBase._apply):
        vars(module)["_apply"] = partial(_assign_data, module)


def _assign_data(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Do what `nn.Module._apply` does with real tensors."""
    for child in module.children() if recurse else ():
        child._apply(convert)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.data = convert(parameter)
            if parameter.grad is not None:
                parameter.grad.data = convert(parameter.grad)
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, convert(buffer))
    return module


def example_arguments(
    model: nn.Module, example_inputs: Any = None, needed_by: str = ""
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) for `model(*args, **kwargs)`.

    Args:
        model: whose forward gets the arguments.
        example_inputs: a tuple of positional arguments, a mapping of keyword arguments, or one tensor. None stands for
            the `dummy_inputs` of a transformers model.
        needed_by: the config key that needs the inputs, for the error.

    Raises:
        ConfigError: `example_inputs` has another type, or is None for a model without dummy inputs.
    """
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, tuple):
        return example_inputs, {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if example_inputs is not None:
        raise ConfigError(
            describe(
                "example_inputs",
                f"a {type(example_inputs).__name__}",
                "a tuple of positional arguments, a mapping of keyword arguments, or a tensor",
                "Wrap it: example_inputs=(value,) calls model(value).",
            )
        )
    return (), _dummy_inputs(model, needed_by)


def _dummy_inputs(model: nn.Module, needed_by: str) -> dict[str, Any]:
    dummy = getattr(model, "dummy_inputs", None)
    # transformers' base class returns token ids for every model, also for a vision model.
    main_input = getattr(model, "main_input_name", "input_ids")
    if isinstance(dummy, Mapping) and main_input in dummy:
        return dict(dummy)
    why = "" if dummy is None else f", and dummy_inputs of {type(model).__name__} have no {main_input!r}"
    remedy = (
        'a batch, as a tuple (args) or a dict (kwargs): {"input_ids": torch.zeros(2, 8, dtype=torch.long)}. Only '
        "shapes, dtypes and structure matter."
    )
    if needed_by:
        raise ConfigError(
            f"{needed_by} needs inputs of the model's forward, but none were passed{why}. Pass example_inputs: {remedy}"
            " On the command line, name a function that returns them: --inputs file.py:function."
        )
    raise ConfigError(f"example_inputs must be inputs of the model's forward, but none were passed{why}. Pass {remedy}")

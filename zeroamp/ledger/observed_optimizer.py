"""Observes the dtypes of the user's optimizer state for `Ledger.verify`, without an update."""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.hooks.tensors import tensors_in
from zeroamp.planning.mesh import local_part

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def listed(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers as a tuple."""
    if optimizers is None:
        return ()
    return (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)


def problem_with(optimizers: Optimizers, root: nn.Module) -> str | None:
    """Return why optimizers cannot be observed: the end of a sentence. None if they can."""
    own = {id(parameter) for parameter in root.parameters()}
    given: Sequence[object] = listed(optimizers)
    for optimizer in given:
        if not isinstance(optimizer, torch.optim.Optimizer):
            return f"must be an optimizer or a list of optimizers, but has a {type(optimizer).__name__}"
        if any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values()):
            return f"is a {type(optimizer).__name__}, which wraps another optimizer. Pass the inner one"
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            return f"is a {type(optimizer).__name__} without parameters of the model. Build it after wrap_model"
    return None


def state_dtypes(
    optimizers: Sequence[torch.optim.Optimizer], parameter: nn.Parameter, gradient: torch.Tensor | None
) -> Iterator[tuple[torch.dtype | None, str]]:
    """Yield (dtype, name of the tensor) for the state of a parameter. The dtype is None if there is no state.

    Yields nothing if no optimizer has the parameter, or this rank has no element of it.

    If the parameter has no state yet, a copy of the optimizer makes it in a step with `gradient`, on a copy of this
    rank's shard.
    """
    optimizer = next((each for each in optimizers if any(own is parameter for own in _parameters_of(each))), None)
    if optimizer is None:
        return
    state = optimizer.state.get(parameter)
    if not state:
        shard = local_part(parameter.detach())
        if gradient is None or shard.numel() == 0:
            return
        stepped = nn.Parameter(shard.clone())
        stepped.grad = local_part(gradient.detach()).clone()
        state = _stepped(optimizer, parameter, stepped).get(stepped, {})
    found_dtypes: list[tuple[torch.dtype | None, str]] = [
        (dtype, f"{type(optimizer).__name__}'s {name}")
        for name, value in state.items()
        for tensor in tensors_in([value])
        if tensor.dim() > 0 or (parameter.dim() == 0 and name != "step")  # others are counts and factors
        for dtype in _dtypes_of(tensor)
    ]
    yield from found_dtypes or [(None, type(optimizer).__name__)]


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _stepped(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, stepped: nn.Parameter
) -> defaultdict[torch.Tensor, dict[str, object]]:
    """Return the state after one step of a copy of `optimizer` that has `stepped` in the place of `parameter`.

    Each other parameter is replaced by an empty one without a gradient, because bitsandbytes reads the settings of a
    parameter by the number of its group and its own number there. The copy has no hooks. Its `step` is that of the
    class, not one that a scheduler or torch.compile has set.
    """
    absent = nn.Parameter(torch.empty(0))
    groups = [
        {
            name: [stepped if each is parameter else absent for each in value] if name == "params" else _copied(value)
            for name, value in group.items()
        }
        for group in optimizer.param_groups
    ]
    one = type(optimizer).__new__(type(optimizer))
    # As in unpickling. Not `copy.copy`, whose result has the optimizer's own groups, to which `__setstate__` adds keys.
    one.__setstate__({"defaults": _copied(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups})
    for name, value in vars(optimizer).items():
        if name not in vars(one) and name != "step":
            vars(one)[name] = _copied(value) if isinstance(value, list | dict | set | torch.Tensor) else value
    one.step()
    return one.state


def _copied(value: object) -> object:
    """Return a deep copy in which parameters are the same objects."""
    return copy.deepcopy(value, {id(each): each for each in tensors_in([value]) if isinstance(each, nn.Parameter)})


def _dtypes_of(tensor: torch.Tensor) -> list[torch.dtype]:
    """Return the dtypes in which values are stored. The `dtype` of a quantized tensor is another one."""
    if isinstance(tensor, DTensor) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor.dtype]
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name).dtype for name in names]

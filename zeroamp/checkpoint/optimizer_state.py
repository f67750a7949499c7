"""The state of an optimizer in a checkpoint: sharded tensors by parameter name, and everything else as values."""

import math
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.checkpoint.half_loaded import state_of
from zeroamp.checkpoint.manifest import Layout
from zeroamp.checkpoint.model_state import MODEL, state_by_name
from zeroamp.host_memory.storages import bring_state_back
from zeroamp.planning.mesh import local_part, num_shards_of, sharded_like
from zeroamp.policies.errors import CheckpointError, describe, some_of

OPTIMIZER = "optimizer."

OwnState = dict[str, dict[str, Any]]
"""FQN -> key -> what this rank saves for itself: plain values, plain tensors, its shard in a tensor subclass."""


def optimizer_state(
    optimizer: torch.optim.Optimizer, root: nn.Module
) -> tuple[dict[str, torch.Tensor], dict[str, Any], OwnState]:
    """Return an optimizer's sharded tensors by name in the checkpoint, a description, and this rank's own state.

    The sharded tensors are DTensors like their parameter. The description is the same on all ranks:

        "class"    `class_name` of the optimizer
        "groups"   its param groups, with names in place of parameters
        "sharded"  FQN -> keys of the sharded tensors of its state
        "layouts"  FQN -> how the parameter is sharded, if tensors of its own state belong to that (8-bit values in
                   blocks, for example)

    Raises:
        CheckpointError: a parameter of the optimizer has no name in the model, a tensor is sharded otherwise than its
            parameter, or an inner optimizer has state that is not in `optimizer.state`.
    """
    _refuse_inner_state(optimizer)
    bring_state_back(optimizer)
    names = _names(root)
    tensors: dict[str, torch.Tensor] = {}
    own: OwnState = {}
    sharded: dict[str, list[str]] = {}
    layouts: dict[str, str] = {}
    for parameter, entries in optimizer.state.items():
        if not entries:
            continue
        fqn = _name_of(parameter, names)
        own[fqn], sharded[fqn] = {}, []
        for key, value in entries.items():
            if isinstance(value, DTensor) and not _is_subclass(value):
                _refuse_other_sharding(value, parameter, f"The optimizer's state {key!r} of {fqn}")
                tensors[f"{OPTIMIZER}{fqn}.{key}"] = value.detach()
                sharded[fqn].append(key)
                continue
            own[fqn][key] = _local(value) if isinstance(value, torch.Tensor) else value
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                layouts[fqn] = _layout(parameter, root)
    groups = [
        {**group, "params": [_name_of(parameter, names) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    description = {"class": class_name(optimizer), "groups": groups, "sharded": sharded, "layouts": layouts}
    return tensors, description, own


def class_name(owner: object) -> str:
    """Return the qualified name of an object's class. torch.optim's own modules may be other ones in another torch."""
    module, name = type(owner).__module__, type(owner).__qualname__
    is_torch = module.startswith("torch.optim.") and not module.endswith(".lr_scheduler")
    return f"{'torch.optim' if is_torch else module}.{name}"


def is_class_name(saved: object, name: str) -> bool:
    """Return whether a saved class has this `class_name`. Format 2 has names without their modules."""
    return saved in (name, name.rpartition(".")[2])


def _refuse_inner_state(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose inner optimizers have state that is not in its own `state`: a save would lose it."""
    for inner in _inner_optimizers(list(vars(optimizer).values())):
        for parameter, entries in inner.state.items():
            if not entries.keys() <= optimizer.state.get(parameter, {}).keys():
                raise CheckpointError(
                    f"The optimizer {type(optimizer).__name__} holds an inner {type(inner).__name__}, whose state is "
                    "not in its own `state`, so a checkpoint would lose it. Pass the inner optimizers: "
                    "TrainStep(model, [one, other])."
                )


def _inner_optimizers(values: list[Any]) -> Iterator[torch.optim.Optimizer]:
    for value in values:
        if isinstance(value, torch.optim.Optimizer):
            yield value
        elif isinstance(value, list | tuple):
            yield from _inner_optimizers(list(value))


def _is_subclass(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or this rank's part of it, is a subclass with inner tensors, such as 8-bit values."""
    return hasattr(type(_local(tensor)), "__tensor_flatten__")


@torch.no_grad()
def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_part(tensor.detach())


def _refuse_other_sharding(value: DTensor, parameter: torch.Tensor, where: str) -> None:
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    if value.shape != parameter.shape or value.placements != placements:
        found = f"shape {list(value.shape)} {value.placements}"
        valid = f"sharded as its parameter, shape {list(parameter.shape)} {placements}"
        raise CheckpointError(describe(where, found, valid, "Keep tensors of other shapes as plain tensors."))


def _layout(parameter: torch.Tensor, root: nn.Module) -> str:
    """Return how a parameter of the model is divided over the ranks."""
    if not isinstance(parameter, DTensor) or num_shards_of(parameter) == 1:
        return "not sharded"
    mesh = parameter.device_mesh
    axes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False))
    return f"sharded {parameter.placements} over {axes} of {state_of(root).axes.whole.size()} ranks"


def _names(root: nn.Module) -> dict[int, str]:
    tensors, _ = state_by_name(root)
    return {id(value): name for name, value in tensors.items()}


def _name_of(parameter: torch.Tensor, names: dict[int, str]) -> str:
    if id(parameter) not in names:
        found = f"a parameter of shape {list(parameter.shape)}" if isinstance(parameter, torch.Tensor) else parameter
        raise CheckpointError(
            f"The optimizer holds {found}, which is not in the model's state_dict(). Build the optimizer from "
            "model.parameters(), after wrap_model. Save other state as `extra`."
        )
    return names[id(parameter)]


def check_optimizer_fits(
    optimizer: torch.optim.Optimizer, description: dict[str, Any], root: nn.Module, where: str, ours_name: str
) -> None:
    """Raise CheckpointError unless the optimizer has the saved class and groups, and fitting values and shards.

    Errors call the checkpoint `where` and the optimizer `ours_name`.
    """
    names, name = _names(root), class_name(optimizer)
    ours = _numbers([_name_of(parameter, names) for parameter in group["params"]] for group in optimizer.param_groups)
    saved = _numbers(group["params"] for group in description["groups"])
    differing = [fqn for fqn in sorted({**saved, **ours}) if saved.get(fqn) != ours.get(fqn)]
    is_same_class = is_class_name(description["class"], name)
    if not is_same_class or differing:
        problem = (
            f"has the state of {description['class']}, but {ours_name} of TrainStep is {name}"
            if not is_same_class
            else f"has other param groups than {ours_name} of TrainStep. They differ in {some_of(differing, 5)}"
        )
        raise CheckpointError(
            f"{where} {problem}. Build the optimizer as it was, or load the model alone: "
            "load_checkpoint(folder, model)."
        )
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        fqn, here = names[id(parameter)], _layout(parameter, root)
        if (was := description["layouts"].get(fqn, here)) != here:
            raise CheckpointError(
                f"{where} has optimizer state of {fqn} that cannot be resharded, such as 8-bit values in blocks: the "
                f"parameter was {was}, but is {here} here. Use as many ranks and the same stage, mesh, "
                "zeroamp.shard_dim and ignored_params, or load without optimizer state: "
                "load_checkpoint(..., load_optimizer_states=False)."
            )
    _check_groups(optimizer, description["groups"], where, ours_name)


def _numbers(groups: Iterable[list[str]]) -> dict[str, int]:
    """Return FQN -> number of its param group."""
    return {fqn: number for number, names in enumerate(groups) for fqn in names}


def _check_groups(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]], where: str, ours_name: str) -> None:
    """Raise CheckpointError for saved param groups that have a number that is not finite, or text for a number."""
    for index, (ours, theirs) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        for key, value in theirs.items():
            if key in ("params", "param_names"):
                continue
            is_number = isinstance(ours.get(key), Real | torch.Tensor) and not isinstance(ours[key], bool)
            is_kept = not isinstance(value, torch.Tensor) and value == ours.get(key)  # an option may be infinite
            if (_has_nonfinite(value) and not is_kept) or (is_number and not isinstance(value, Real | torch.Tensor)):
                raise CheckpointError(
                    f"{where} has {value!r} as {key} of param group {index} of {ours_name}, where TrainStep has "
                    f"{ours.get(key)!r}. Load another checkpoint, or load without optimizer state: "
                    "load_checkpoint(..., load_optimizer_states=False)."
                )


def _has_nonfinite(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_nonfinite, value))
    if isinstance(value, torch.Tensor):
        return not bool(value.isfinite().all())
    return isinstance(value, Real) and not math.isfinite(value)


def optimizer_targets(
    description: dict[str, Any], parameters: dict[str, torch.Tensor], layouts: Mapping[str, Layout]
) -> dict[str, torch.Tensor]:
    """Return uninitialised tensors, sharded like their parameter, into which the sharded state is read.

    `parameters` has the model's tensors by name in the checkpoint.
    """
    targets = {}
    for fqn, keys in description["sharded"].items():
        for key in keys:
            parameter, saved = parameters[MODEL + fqn].detach(), layouts[name := f"{OPTIMIZER}{fqn}.{key}"]
            if saved.shape != tuple(parameter.shape):
                raise ValueError(f"{name} has the shape {list(saved.shape)}, its parameter {list(parameter.shape)}")
            targets[name] = torch.empty_like(parameter, dtype=saved.torch_dtype)
    return targets


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    description: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    own: OwnState,
    root: nn.Module,
) -> None:
    """Load a described state, with its sharded tensors and this rank's own, by `Optimizer.load_state_dict`."""
    names = _names(root)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {}
    for number, parameter in enumerate(parameters):
        if (fqn := names[id(parameter)]) in own:
            state[number] = {key: _as_sharded(value, parameter) for key, value in own[fqn].items()} | {
                key: tensors[f"{OPTIMIZER}{fqn}.{key}"] for key in description["sharded"][fqn]
            }
    optimizer.load_state_dict({"state": state, "param_groups": _numbered_groups(optimizer, description["groups"])})
    for number, entries in state.items():
        _keep_dtypes(optimizer.state[parameters[number]], entries, parameters[number].device)


def _as_sharded(value: Any, parameter: torch.Tensor) -> Any:
    """Return this rank's shard in a tensor subclass as a DTensor like its parameter, and other values as they are."""
    if not (isinstance(value, torch.Tensor) and _is_subclass(value) and isinstance(parameter, DTensor)):
        return value
    return sharded_like(value.to(parameter.device), parameter)


def _numbered_groups(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved groups in the form of `Optimizer.load_state_dict`. Tensors are moved to its devices."""
    groups, index = [], 0
    for ours, theirs in zip(optimizer.param_groups, saved, strict=True):
        values = {key: value for key, value in theirs.items() if key not in ("params", "param_names")}
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and isinstance(ours.get(key), torch.Tensor):
                values[key] = value.to(ours[key].device)
        groups.append({**values, "params": list(range(index, index + len(ours["params"])))})
        index += len(ours["params"])
    return groups


def _keep_dtypes(loaded: dict[str, Any], saved: dict[str, Any], device: torch.device) -> None:
    """Restore the saved dtypes: `Optimizer.load_state_dict` casts all state but "step" to the parameter's dtype."""
    for key, value in saved.items():
        if key != "step" and isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype:
            loaded[key] = value.to(device)

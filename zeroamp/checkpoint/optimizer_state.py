"""The state of an optimizer in a checkpoint: its tensors by parameter name, and a description of everything else."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from zeroamp.checkpoint.model_state import named_differences, state_by_name
from zeroamp.planning.mesh import local_part, num_shards_of
from zeroamp.policies.errors import CheckpointError, describe
from zeroamp.tensor_shards import is_bound_to_shard

OPTIMIZER = "optimizer."


def optimizer_state(
    optimizer: torch.optim.Optimizer, root: nn.Module
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer's state by name in the checkpoint, and a description of everything else.

    Tensors of the parameter's shape are sharded DTensors. The description is a dict:

        "class"   name of the optimizer's class
        "groups"  its param groups, with names in place of parameters
        "state"   FQN -> key -> "sharded", "plain", "own" (this rank's part, in a tensor subclass such as torchao's) or
                  ["value", the value]; no entry for a parameter that was never updated
        "whole"   names of parameters that are not sharded: those of `ignored_params`, scalars
        "bound"   FQN -> number of shards, for state that is tied to the shards (8-bit values in blocks, for example)

    Raises:
        CheckpointError: a parameter of the optimizer has no name in the model, a value of the state could not be loaded
            again, or an inner optimizer has state that is not in `optimizer.state`.
    """
    names = {id(value): name for name, value in state_by_name(root).items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _refuse_foreign_state(optimizer, parameters)
    _refuse_inner_state(optimizer)
    tensors: dict[str, torch.Tensor] = {}
    kinds: dict[str, dict[str, Any]] = {}
    for parameter in parameters:
        fqn = _name_of(parameter, names)
        for key, value in optimizer.state.get(parameter, {}).items():
            kind = _kind_of(value, parameter, f"The optimizer's state {key!r} of {fqn}")
            if isinstance(value, torch.Tensor):
                tensors[f"{OPTIMIZER}{fqn}.{key}"] = _local(value) if kind == "own" else value.detach()
            kinds.setdefault(fqn, {})[key] = kind
    groups = [
        {**group, "params": [_name_of(parameter, names) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    whole = [_name_of(parameter, names) for parameter in parameters if not isinstance(parameter, DTensor)]
    bound = {
        _name_of(parameter, names): num_shards_of(parameter)
        for parameter in parameters
        if is_bound_to_shard(parameter, optimizer.state.get(parameter, {}))
    }
    description = {"class": type(optimizer).__name__, "groups": groups, "state": kinds, "whole": whole}
    return tensors, description | ({"bound": bound} if bound else {})


def _refuse_foreign_state(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    own = {id(parameter) for parameter in parameters}
    foreign = [key for key, entries in optimizer.state.items() if entries and id(key) not in own]
    if foreign:
        raise CheckpointError(
            f"The optimizer has state under {_short(foreign[0])}, which is not a parameter of its groups. Save such "
            "state as `extra`."
        )


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
        elif type(value) is dict:
            yield from _inner_optimizers(list(value.values()))


def is_subclass(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or this rank's part of it, is a subclass with inner tensors, such as 8-bit values."""
    return hasattr(type(_local(tensor)), "__tensor_flatten__")


@torch.no_grad()
def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_part(tensor.detach())


def _kind_of(value: object, parameter: torch.Tensor, where: str) -> Any:
    """Return the description of one value of the state: see `optimizer_state`."""
    if not isinstance(value, torch.Tensor):
        if _holds_tensor(value):
            found = f"a {type(value).__name__} with tensors in it"
            raise CheckpointError(describe(where, found, "a tensor or plain values", "Give each its own key."))
        return ["value", value]
    if is_subclass(value):
        return "own"
    if not isinstance(value, DTensor):
        return "plain"
    found_form, valid_form = _form(value), _form(parameter)
    if found_form != valid_form:
        valid = f"sharded as its parameter, {valid_form}"
        raise CheckpointError(describe(where, found_form, valid, "Keep tensors of other shapes as plain tensors."))
    return "sharded"


def _holds_tensor(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensor, value))
    return isinstance(value, torch.Tensor)


def _form(tensor: torch.Tensor) -> str:
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return f"shape {list(tensor.shape)} {placements}"


def _short(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _name_of(parameter: torch.Tensor, names: dict[int, str]) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"The optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the model's "
            "state_dict(). Build the optimizer from model.parameters(), after wrap_model."
        )
    return names[id(parameter)]


def optimizer_targets(
    description: dict[str, Any],
    parameters: dict[str, torch.Tensor],
    metadata: Metadata,
    own: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return uninitialised tensors, by name, into which the described state is read.

    They are sharded like the parameter if the saved tensors were, else plain and on the CPU. Tensors in `own`, which
    were read from this rank's file, are left out.
    """
    targets = {}
    for fqn, kinds in description["state"].items():
        for key, kind in kinds.items():
            name = f"{OPTIMIZER}{fqn}.{key}"
            if kind == "sharded":
                dtype = _saved(metadata, name).properties.dtype
                targets[name] = torch.empty_like(parameters[fqn].detach(), dtype=dtype)
            elif kind == "plain" and name not in own:
                saved = _saved(metadata, name)
                targets[name] = torch.empty(saved.size, dtype=saved.properties.dtype)
    return targets


def _saved(metadata: Metadata, name: str) -> TensorStorageMetadata:
    saved = metadata.state_dict_metadata[name]
    if not isinstance(saved, TensorStorageMetadata):
        raise AssertionError(f"expected a tensor under {name}, got {saved}")
    return saved


def load_optimizer(
    optimizer: torch.optim.Optimizer, description: dict[str, Any], tensors: dict[str, torch.Tensor], root: nn.Module
) -> None:
    """Load a described state with `Optimizer.load_state_dict`.

    Raises:
        CheckpointError: `load_state_dict` did not store all of the state.
    """
    names = {id(value): name for name, value in state_by_name(root).items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {}
    for number, parameter in enumerate(parameters):
        fqn = names[id(parameter)]
        if fqn in description["state"]:
            state[number] = {
                key: _loaded(kind, f"{fqn}.{key}", tensors, parameter)
                for key, kind in description["state"][fqn].items()
            }
    groups = _numbered_groups(optimizer, description["groups"])
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for number, entries in state.items():
        if not entries.keys() <= optimizer.state.get(parameters[number], {}).keys():
            raise CheckpointError(
                f"{type(optimizer).__name__}.load_state_dict lost the state of {names[id(parameters[number])]}. If "
                "it holds several optimizers, pass these: TrainStep(model, [one, other])."
            )
        _keep_dtypes(optimizer.state[parameters[number]], entries, parameters[number].device)


def _loaded(kind: Any, name: str, tensors: dict[str, torch.Tensor], parameter: torch.Tensor) -> Any:
    if not isinstance(kind, str):
        return kind[1]
    tensor = tensors[f"{OPTIMIZER}{name}"]
    if kind != "own" or not isinstance(parameter, DTensor):
        return tensor
    own_shape = _local(parameter).shape
    if tensor.shape != own_shape:
        raise CheckpointError(
            f"The optimizer's state {name} has shards of shape {tuple(tensor.shape)}, but this rank's shard is "
            f"{tuple(own_shape)}. Start as many ranks with the same zeroamp.shard_dim, or load the model alone: "
            "load_checkpoint(folder, model)."
        )
    mesh, placements, shape, stride = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
    local = tensor.to(parameter.device)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


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


def check_optimizer_fits(
    optimizer: torch.optim.Optimizer, description: dict[str, Any], root: nn.Module, where: str, ours_name: str
) -> None:
    """Raise CheckpointError unless the optimizer has the saved class and param groups. Errors call it `ours_name`."""
    names = {id(value): name for name, value in state_by_name(root).items()}
    ours = [sorted(_name_of(parameter, names) for parameter in group["params"]) for group in optimizer.param_groups]
    saved = [sorted(group["params"]) for group in description["groups"]]
    name = type(optimizer).__name__
    if name != description["class"]:
        problem = f"has the state of {description['class']}, but {ours_name} of TrainStep is {name}"
    elif ours != saved:
        problem = f"has other param groups than {ours_name} of TrainStep: {_group_difference(saved, ours)}"
    else:
        return
    raise CheckpointError(
        f"{where} {problem}. Build the optimizer as it was, or load the model alone: load_checkpoint(folder, model)."
    )


def check_sharding_fits(
    description: dict[str, Any],
    parameters: dict[str, torch.Tensor],
    metadata: Metadata,
    own: dict[str, torch.Tensor],
    where: str,
) -> None:
    """Raise CheckpointError for plain state of a parameter that is sharded only here, or was sharded only in the save.

    Plain tensors of state are loaded as they were saved, so their shapes would not fit the parameter. State that is
    tied to shards needs as many shards as in the save.
    """
    for fqn, number in description.get("bound", {}).items():
        ours = num_shards_of(parameters[fqn]) if fqn in parameters else number
        if ours != number:
            raise CheckpointError(
                f"{where} has optimizer state of {fqn} that belongs to its {number} shards, such as 8-bit values in "
                f"blocks, but there are {ours} here. Start as many ranks with the same stage and mesh, or load the "
                "model alone: load_checkpoint(folder, model)."
            )
    if "whole" not in description:  # earlier versions
        return
    for fqn, kinds in description["state"].items():
        was_whole, is_whole = fqn in description["whole"], not isinstance(parameters.get(fqn), DTensor)
        names = [f"{OPTIMIZER}{fqn}.{key}" for key, kind in kinds.items() if kind in ("plain", "own")]
        shapes = {each: own[each].shape if each in own else _saved(metadata, each).size for each in names}
        name = next((each for each, shape in shapes.items() if shape), None)
        if fqn in parameters and was_whole != is_whole and name is not None:
            saved, do = ("not sharded", "Pass it in") if was_whole else ("sharded", "Leave it out of")
            raise CheckpointError(
                f"{where} was saved with {fqn} {saved}, so its optimizer state {name} does not fit here. {do} "
                "ignored_params of wrap_model, as in the save, or load without optimizer state: "
                "load_checkpoint(..., load_optimizer_states=False)."
            )


def _group_difference(saved: list[list[str]], ours: list[list[str]]) -> str:
    if len(saved) != len(ours):
        return f"{len(saved)} instead of {len(ours)}"
    index = next(i for i, (theirs, here) in enumerate(zip(saved, ours, strict=True)) if theirs != here)
    only_saved, only_ours = set(saved[index]) - set(ours[index]), set(ours[index]) - set(saved[index])
    return "; ".join(
        [
            f"param group {index}",
            *named_differences("only in the checkpoint", only_saved),
            *named_differences("only in the optimizer", only_ours),
        ]
    )

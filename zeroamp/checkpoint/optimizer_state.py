"""What a checkpoint holds of an optimizer: tensors by parameter name, and a description of plain values."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from zeroamp.checkpoint.state import named_differences, state_by_name
from zeroamp.policies.errors import CheckpointError, describe

OPTIMIZER = "optimizer."


@dataclass(slots=True)
class OptimizerState:
    """An optimizer's state, taken apart by parameter name."""

    tensors: dict[str, torch.Tensor]
    """By name in the checkpoint; those like their parameter are sharded DTensors."""
    description: dict[str, Any]
    """The class, the param groups with names for parameters, and for each parameter what its state consists of:
    "sharded", "plain", or ["value", it]."""


def optimizer_state(optimizer: torch.optim.Optimizer, root: nn.Module) -> OptimizerState:
    """Take an optimizer's state apart. A parameter without state, not yet or never updated, has none here.

    Raises:
        CheckpointError: a parameter of the optimizer has no name in the model, or state is of a form that could not be
            loaded again.
    """
    names = {id(value): name for name, value in state_by_name(root).items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _refuse_foreign_state(optimizer, parameters)
    tensors: dict[str, torch.Tensor] = {}
    kinds: dict[str, dict[str, Any]] = {}
    for parameter in parameters:
        fqn = _name_of(parameter, names)
        for key, value in optimizer.state.get(parameter, {}).items():
            kind = _kind_of(value, parameter, f"the optimizer's state {key!r} of {fqn}")
            if isinstance(value, torch.Tensor):
                tensors[f"{OPTIMIZER}{fqn}.{key}"] = value.detach()
            kinds.setdefault(fqn, {})[key] = kind
    groups = [
        {**group, "params": [_name_of(parameter, names) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return OptimizerState(tensors, {"class": type(optimizer).__name__, "groups": groups, "state": kinds})


def _refuse_foreign_state(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    own = {id(parameter) for parameter in parameters}
    foreign = [key for key, entries in optimizer.state.items() if entries and id(key) not in own]
    if foreign:
        found = f"state under {_short(foreign[0])}, which is no parameter of its groups"
        raise CheckpointError(describe("the optimizer", found, "state of parameters", "Save it as `extra`."))


def _kind_of(value: object, parameter: torch.Tensor, where: str) -> Any:
    """Return how a part of the state is described."""
    if not isinstance(value, torch.Tensor):
        if _holds_tensor(value):
            found = f"tensors in a {type(value).__name__}"
            raise CheckpointError(
                describe(where, found, "a tensor, or plain values", "Keep each in an entry of its own.")
            )
        return ["value", value]
    if not isinstance(value, DTensor):
        return "plain"
    found_form, valid_form = _form(value), _form(parameter)
    if found_form != valid_form:
        raise CheckpointError(
            describe(
                where,
                f"a sharded tensor of {found_form}",
                f"{valid_form}, as the parameter",
                "Keep others as plain tensors.",
            )
        )
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
            describe(
                "the optimizer",
                f"a parameter of shape {tuple(parameter.shape)} that is not in the model's state_dict()",
                "parameters of the wrapped model",
                "Build the optimizer from model.parameters(), after wrap_model.",
            )
        )
    return names[id(parameter)]


def optimizer_targets(
    description: dict[str, Any],
    parameters: dict[str, torch.Tensor],
    metadata: Metadata,
    own: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return empty tensors by name for a described state: like the parameter where it was sharded, else on the CPU.

    What the rank saved as its `own` needs none.
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
    """Give an optimizer a described state, in torch's own way: `Optimizer.load_state_dict`."""
    names = {id(value): name for name, value in state_by_name(root).items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {}
    for number, parameter in enumerate(parameters):
        fqn = names[id(parameter)]
        if fqn in description["state"]:
            state[number] = {
                key: tensors[f"{OPTIMIZER}{fqn}.{key}"] if isinstance(kind, str) else kind[1]
                for key, kind in description["state"][fqn].items()
            }
    groups = _numbered_groups(optimizer, description["groups"])
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for number, entries in state.items():
        _keep_dtypes(optimizer.state[parameters[number]], entries, parameters[number].device)


def _numbered_groups(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved groups as `Optimizer.load_state_dict` takes them, with tensors where the optimizer has them."""
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
    """Put back what `Optimizer.load_state_dict` cast to the parameter's dtype, as it does with all state but "step"."""
    for key, value in saved.items():
        if key != "step" and isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype:
            loaded[key] = value.to(device)


def check_optimizer_fits(
    optimizer: torch.optim.Optimizer, description: dict[str, Any], root: nn.Module, where: str
) -> None:
    """Raise CheckpointError unless the optimizer is of the saved class and groups the same parameters."""
    names = {id(value): name for name, value in state_by_name(root).items()}
    ours = [sorted(_name_of(parameter, names) for parameter in group["params"]) for group in optimizer.param_groups]
    saved = [sorted(group["params"]) for group in description["groups"]]
    name = type(optimizer).__name__
    if name != description["class"]:
        found, valid = f"the state of {description['class']}", f"of {name}, the optimizer given"
    elif ours != saved:
        found, valid = _group_difference(saved, ours), f"the {len(ours)} param groups of the optimizer given"
    else:
        return
    remedy = "Build the optimizer as it was, or load the model alone: load_checkpoint(folder, model)."
    raise CheckpointError(describe(where, found, valid, remedy))


def _group_difference(saved: list[list[str]], ours: list[list[str]]) -> str:
    if len(saved) != len(ours):
        return f"{len(saved)} param groups"
    index = next(i for i, (theirs, here) in enumerate(zip(saved, ours, strict=True)) if theirs != here)
    only_saved, only_ours = set(saved[index]) - set(ours[index]), set(ours[index]) - set(saved[index])
    return "; ".join(
        [
            f"param group {index}",
            *named_differences("only in the checkpoint", only_saved),
            *named_differences("only here", only_ours),
        ]
    )

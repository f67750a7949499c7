"""What a checkpoint holds of a model and its optimizer: tensors by name, and a description of plain values.

Names are the model's own, without what torch.compile puts in: `model.<fqn>` and `optimizer.<fqn>.<name>`. A parameter
or buffer that several modules share is there once, under its first name.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from zeroamp.policies.errors import CheckpointError, describe

MODEL, OPTIMIZER = "model.", "optimizer."
_NUM_NAMED = 5  # differences of one kind that an error names


def state_by_name(root: nn.Module) -> dict[str, Any]:
    """Return what `root.state_dict()` holds, the live objects: parameters, persistent buffers, extra state."""
    named: dict[str, Any] = {}
    seen: set[int] = set()
    for key, value in root.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) in seen:
            continue
        seen.add(id(value))
        named[key.replace("_orig_mod.", "")] = value
    return named


def model_tensors(root: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's tensors by name in the checkpoint, detached but not copied."""
    state = state_by_name(root)
    return {MODEL + name: value.detach() for name, value in state.items() if isinstance(value, torch.Tensor)}


def extra_states(root: nn.Module) -> dict[str, Any]:
    """Return what modules' `get_extra_state` gave that is no tensor, by name in `root.state_dict()`."""
    return {key: value for key, value in root.state_dict().items() if not isinstance(value, torch.Tensor)}


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
        CheckpointError: a parameter of the optimizer has no name in the model.
    """
    names = {id(value): name for name, value in state_by_name(root).items()}
    tensors: dict[str, torch.Tensor] = {}
    kinds: dict[str, dict[str, Any]] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        fqn = _name_of(parameter, names)
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{OPTIMIZER}{fqn}.{key}"] = value.detach()
                kind: Any = "sharded" if isinstance(value, DTensor) else "plain"
            else:
                kind = ["value", value]
            kinds.setdefault(fqn, {})[key] = kind
    groups = [
        {**group, "params": [_name_of(parameter, names) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return OptimizerState(tensors, {"class": type(optimizer).__name__, "groups": groups, "state": kinds})


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
    description: dict[str, Any], parameters: dict[str, torch.Tensor], metadata: Metadata
) -> dict[str, torch.Tensor]:
    """Return empty tensors by name for a described state: like the parameter where it was sharded, else on the CPU."""
    targets = {}
    for fqn, kinds in description["state"].items():
        for key, kind in kinds.items():
            name = f"{OPTIMIZER}{fqn}.{key}"
            if kind == "sharded":
                targets[name] = torch.empty_like(
                    parameters[fqn].detach(), dtype=_saved(metadata, name).properties.dtype
                )
            elif kind == "plain":
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
    saved_group = {fqn: group for group in description["groups"] for fqn in group["params"]}
    groups, state, index = [], {}, 0
    for group in optimizer.param_groups:
        fqns = [names[id(parameter)] for parameter in group["params"]]
        for number, fqn in enumerate(fqns, start=index):
            kinds = description["state"].get(fqn)
            if kinds is not None:
                state[number] = {
                    key: tensors[f"{OPTIMIZER}{fqn}.{key}"] if isinstance(kind, str) else kind[1]
                    for key, kind in kinds.items()
                }
        hyperparameters = saved_group[fqns[0]] if fqns else group
        groups.append({**hyperparameters, "params": list(range(index, index + len(fqns)))})
        index += len(fqns)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def check_model_fits(tensors: dict[str, torch.Tensor], metadata: Metadata, where: str) -> None:
    """Raise CheckpointError unless the model's tensors are the saved ones, in names, shapes and dtypes."""
    saved = {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(MODEL) and isinstance(entry, TensorStorageMetadata)
    }
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    differences = [
        *_named("only in the checkpoint", (name for name in saved if name not in found)),
        *_named("only in the model", (name for name in found if name not in saved)),
        *_named(
            "different",
            (
                f"{name} (checkpoint {_form(saved[name])}, model {_form(found[name])})"
                for name in found
                if name in saved and saved[name] != found[name]
            ),
        ),
    ]
    if differences:
        raise CheckpointError(
            describe(
                where, "; ".join(differences), "the same parameters and buffers", "Load it into the model it is of."
            )
        )


def _form(shape_and_dtype: tuple[tuple[int, ...], torch.dtype]) -> str:
    shape, dtype = shape_and_dtype
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _named(what: str, names: Iterable[str]) -> list[str]:
    found = sorted(name.removeprefix(MODEL) for name in names)
    if not found:
        return []
    more = f" and {len(found) - _NUM_NAMED} more" if len(found) > _NUM_NAMED else ""
    return [f"{what}: {', '.join(found[:_NUM_NAMED])}{more}"]


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
        [f"param group {index}", *_named("only in the checkpoint", only_saved), *_named("only here", only_ours)]
    )

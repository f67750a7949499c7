"""Experts that the example inputs were not routed to, judged by their twins."""

from collections.abc import Collection, Iterator

import torch
from torch import nn

_SIMPLE = (bool, int, float, str, torch.dtype, type(None))


def twins_of_unrouted(model: nn.Module, called: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (FQN of a child that was not called, FQNs of its twins that were), for the children of a list or dict.

    `called` are FQNs of modules that ran. Twins are children of the same `nn.ModuleList` or `nn.ModuleDict` whose
    forward is the same code over the same shapes: equal classes, plain attributes, parameters and buffers, all the way
    down. All that is left to the container's owner is which index it calls, and that is what the data decided.
    """
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        children = {f"{fqn}.{name}" if fqn else name: child for name, child in module.named_children()}
        for name, child in children.items():
            if not any(inner == name or inner.startswith(f"{name}.") for inner in called):
                signature = _signature(child)
                yield name, [twin for twin in children if twin in called and _signature(children[twin]) == signature]


def _signature(module: nn.Module) -> list[object]:
    return [_own_signature(fqn, inner) for fqn, inner in module.named_modules()]


def _own_signature(fqn: str, module: nn.Module) -> tuple[object, ...]:
    attributes = vars(module)
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return (
        fqn,
        type(module),
        # A forward that was patched on an instance is like no other.
        id(module) if "forward" in attributes else None,
        {name: value if isinstance(value, _SIMPLE) else type(value) for name, value in attributes.items()},
        [len(value) for value in attributes.values() if isinstance(value, dict)],  # hooks, above all
        [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors],
    )

"""Gives a sharded meta-device model its storage and its initial values, one module's parameters at a time.

No rank ever holds a full copy: `to_empty` allocates shards only; then each module that owns parameters gets full ones
for the moment of its own initialisation, and keeps its shard of them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from zeroamp.policies.errors import WrapError, describe


def materialize(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Allocate and initialise a model whose parameters are sharded DTensors on the meta device.

    A transformers model is initialised by its `_init_weights`, other modules by `reset_parameters`. All ranks draw the
    same values: the seed is rank 0's of the mesh, and the random state is put back afterwards.

    Raises:
        WrapError: a module owns parameters or buffers that none of these initialises.
    """
    model.to_empty(device=device)
    with _same_seed(mesh, device), torch.no_grad():
        for fqn, module in model.named_modules():
            if any(True for _ in _own_tensors(module)):
                _initialize(module, fqn or "the root", _initializer(model, module), device)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _initializer(model: nn.Module, module: nn.Module) -> Callable[[], object] | None:
    for_module = getattr(model, "_init_weights", None)  # transformers' one method for all modules of a model
    if callable(for_module):
        return lambda: for_module(module)
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return own if callable(own) else None


def _initialize(module: nn.Module, fqn: str, initializer: Callable[[], object] | None, device: torch.device) -> None:
    sharded = {name: p for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
    for _, buffer in module.named_buffers(recurse=False):
        _poison(buffer)
    for name, parameter in sharded.items():
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        _poison(full)
        module._parameters[name] = nn.Parameter(full, requires_grad=parameter.requires_grad)
    try:
        if initializer is not None:
            initializer()
        for name, tensor in _own_tensors(module):
            _refuse_poison(tensor, f"{fqn}.{name}", module)
        for name, parameter in sharded.items():
            _keep_shard(parameter, module.get_parameter(name))
    finally:
        module._parameters.update(sharded)


def _poison(tensor: torch.Tensor) -> None:
    """Fill with a value that no initialisation leaves behind, so that what was not initialised is found."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def _refuse_poison(tensor: torch.Tensor, fqn: str, module: nn.Module) -> None:
    poisoned = tensor.isnan() if tensor.is_floating_point() else tensor == torch.iinfo(tensor.dtype).min
    if bool(poisoned.any()):
        raise WrapError(
            describe(
                fqn,
                f"a meta-device tensor that {type(module).__name__} does not initialise",
                "modules with reset_parameters(), or a transformers model",
                "Give the class a reset_parameters() that sets it, or build the model off the meta device.",
            )
        )


def _keep_shard(parameter: nn.Parameter, full: torch.Tensor) -> None:
    if not isinstance(parameter, DTensor):
        raise AssertionError(f"expected a sharded DTensor, got {type(parameter).__name__}")
    # src_data_rank=None: every rank slices its own copy, nothing is sent.
    shard = distribute_tensor(full.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(shard.to_local())


@contextmanager
def _same_seed(mesh: DeviceMesh, device: torch.device) -> Iterator[None]:
    seed = torch.tensor([torch.initial_seed() % 2**62], dtype=torch.int64, device=device)
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        dist.broadcast(seed, src=dist.get_global_rank(group, 0), group=group)
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(int(seed.item()))
        yield

"""Allocates and initialises a sharded meta-device model, one module's parameters at a time.

No rank ever has a full copy of the model. The shards are allocated first. Then each module that owns parameters gets
full parameters for its own initialisation, and the shards of these are copied.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from zeroamp.hooks.random_state import random_state, set_random_state
from zeroamp.planning.mesh import axis_groups
from zeroamp.policies.errors import WrapError


def materialize_model(model: nn.Module, mesh: DeviceMesh, device: torch.device, shard_device: torch.device) -> None:
    """Allocate and initialise a model whose parameters are sharded DTensors on the meta device.

    Shards are allocated on `shard_device`. Buffers, parameters without elements, and the full parameters of one module
    at a time are on `device`, which computes. So values do not depend on the device of the shards.

    Children are initialised before parents, in the order of `nn.Module.apply`. A transformers model is initialised by
    its `_init_weights`, other modules by `reset_parameters`. All ranks draw the same values: they use the seed of rank
    0 of the mesh. The random state is restored afterwards. Buffers that are not on the meta device keep their values.

    Raises:
        WrapError: a module owns parameters or buffers that neither of the two initialises.
    """
    pending = {module for module in model.modules() if any(tensor.is_meta for _, tensor in _own_tensors(module))}

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        target = shard_device if isinstance(tensor, DTensor) else device
        return torch.empty_like(tensor, device=target) if tensor.is_meta else tensor.to(target)

    model._apply(allocate)  # type: ignore[no-untyped-call]  # `to_empty` would discard the values of real buffers
    fqns = {module: fqn for fqn, module in model.named_modules()}

    def initialize(module: nn.Module) -> None:
        if module in pending:  # `apply` calls this again for a module that two others share
            pending.remove(module)
            _initialize(module, fqns[module], _initializers(model, module), device)

    with _same_seed(mesh, device), torch.no_grad():
        model.apply(initialize)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _initializers(model: nn.Module, module: nn.Module) -> list[Callable[[], object]]:
    """Return the functions that may initialise `module`: first the model's `_init_weights`, if it has one."""
    for_module = getattr(model, "_init_weights", None)  # of transformers models: one method for all modules
    found: list[Callable[[], object]] = [lambda: for_module(module)] if callable(for_module) else []
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return [*found, own] if callable(own) else found


def _initialize(module: nn.Module, fqn: str, initializers: list[Callable[[], object]], device: torch.device) -> None:
    sharded = {name: p for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
    for name, parameter in sharded.items():
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        module._parameters[name] = nn.Parameter(full, requires_grad=parameter.requires_grad)
    try:
        unset = next((name for name, _ in _own_tensors(module)), None)
        for initializer in initializers:
            if (unset := _first_unset(module, initializer, device)) is None:
                break
        if unset is not None:
            raise WrapError(
                f"{f'{fqn}.{unset}' if fqn else unset} is on the meta device, and "
                f"{type(module).__name__.removeprefix('FSDP')} does not initialise it. Give the class a "
                "reset_parameters() that sets it, or build the model off the meta device."
            )
        for name, parameter in sharded.items():
            _copy_shard(parameter, module.get_parameter(name))
    finally:
        module._parameters.update(sharded)


def _first_unset(module: nn.Module, initializer: Callable[[], object], device: torch.device) -> str | None:
    """Fill the module's tensors, run `initializer`, and return the name of the first tensor that still has the fill.

    The fill is NaN. Integer and boolean tensors are filled with 0 and then, in a second run from the same random state,
    with 1. Elements that differ between the two runs were not set.
    """
    states, results = random_state(device), []
    exact = {name: tensor for name, tensor in _own_tensors(module) if not _has_nan(tensor)}
    for fill in (0, 1) if exact else (0,):
        set_random_state(states, device)
        for _, tensor in _own_tensors(module):
            tensor.fill_(float("nan") if _has_nan(tensor) else fill)
        initializer()
        results.append({name: tensor.clone() for name, tensor in exact.items()})
    for name, tensor in _own_tensors(module):
        is_set = torch.equal(results[0][name], results[1][name]) if name in exact else not tensor.isnan().any()
        if not is_set:
            return name
    return None


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _copy_shard(parameter: nn.Parameter, full: torch.Tensor) -> None:
    if not isinstance(parameter, DTensor):
        raise AssertionError(f"expected a sharded DTensor, got {type(parameter).__name__}")
    # With src_data_rank=None every rank slices its own copy, without communication.
    shard = distribute_tensor(full.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(shard.to_local())


@contextmanager
def _same_seed(mesh: DeviceMesh, device: torch.device) -> Iterator[None]:
    seed = torch.tensor([torch.initial_seed() % 2**62], dtype=torch.int64, device=device)
    for group in axis_groups(mesh):
        dist.broadcast(seed, group=group, group_src=0)
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(int(seed.item()))
        yield

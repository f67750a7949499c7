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
        WrapError: a module owns floating-point tensors that neither of the two initialises.
    """
    on_meta = {module: (fqn, _meta_names(module)) for fqn, module in model.named_modules()}

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        target = shard_device if isinstance(tensor, DTensor) else device
        return torch.empty_like(tensor, device=target) if tensor.is_meta else tensor.to(target)

    model._apply(allocate)  # type: ignore[no-untyped-call]  # `to_empty` would discard the values of real buffers

    def initialize(module: nn.Module) -> None:
        fqn, names = on_meta.pop(module, ("", []))  # `apply` calls this again for a module that two others share
        if names:
            _initialize(module, fqn, names, _initializers(model, module), device)

    with _same_seed(mesh, device), torch.no_grad():
        model.apply(initialize)


def _meta_names(module: nn.Module) -> list[str]:
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return [name for name, tensor in own if tensor.is_meta]


def _initializers(model: nn.Module, module: nn.Module) -> list[Callable[[], object]]:
    """Return the functions that may initialise `module`: first the model's `_init_weights`, if it has one."""
    for_module = getattr(model, "_init_weights", None)  # of transformers models: one method for all modules
    found: list[Callable[[], object]] = [lambda: for_module(module)] if callable(for_module) else []
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return [*found, own] if callable(own) else found


def _initialize(
    module: nn.Module, fqn: str, names: list[str], initializers: list[Callable[[], object]], device: torch.device
) -> None:
    """Initialise the tensors `names` of a module: give it full parameters, and copy this rank's shards of these."""
    sharded = {name: each for name, each in module.named_parameters(recurse=False) if isinstance(each, DTensor)}
    for name, parameter in sharded.items():
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        module._parameters[name] = nn.Parameter(full, requires_grad=parameter.requires_grad)
    try:
        for tensor in (getattr(module, name) for name in names):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)  # what stays NaN was not initialised
        unset = names
        for initializer in initializers:
            initializer()
            if not (unset := [name for name in names if getattr(module, name).isnan().any()]):
                break
        if unset:
            raise WrapError(
                f"{f'{fqn}.{unset[0]}' if fqn else unset[0]} is on the meta device, and "
                f"{type(module).__name__.removeprefix('FSDP')} does not initialise it. Give the class a "
                "reset_parameters() that sets it, or build the model off the meta device."
            )
        for name, parameter in sharded.items():
            # With src_data_rank=None every rank slices its own copy, without communication.
            own, placements = parameter.device_mesh, parameter.placements
            shard = distribute_tensor(module.get_parameter(name).detach(), own, placements, src_data_rank=None)
            parameter.to_local().copy_(shard.to_local())
    finally:
        module._parameters.update(sharded)


@contextmanager
def _same_seed(mesh: DeviceMesh, device: torch.device) -> Iterator[None]:
    seed = torch.tensor([torch.initial_seed() % 2**62], dtype=torch.int64, device=device)
    for group in axis_groups(mesh):
        dist.broadcast(seed, group=group, group_src=0)
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(int(seed.item()))
        yield

"""Checks before a model is wrapped: ranks have, or get, equal parameters, and torch and the device fit the policy.

FSDP2 shards each rank's own values, and communicates nothing when it wraps. Ranks with different seeds would train a
model of parts of different initialisations. At stage 0 and with HSDP, replicas would differ.
"""

import json
from collections.abc import Container
from inspect import signature

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.fsdp import can_shard_integers
from zeroamp.planning.mesh import axis_groups, device_of, expected_shards, local_part, num_shards_of
from zeroamp.planning.mesh_axes import MeshAxes, is_expert
from zeroamp.planning.parameter_uses import quantization_tensors
from zeroamp.planning.plan import Plan
from zeroamp.policies.dtypes import INTEGER_BY_NUM_BYTES, short_name
from zeroamp.policies.errors import ConfigError, WrapError, shown, some_of
from zeroamp.policies.numbers import LOCAL_WORLD_SIZE, size_from_launcher
from zeroamp.policies.policy import Policy
from zeroamp.version import __version__
from zeroamp.wrapping.run_alike import Description

_OF_ONE_RANK = "steps_per_print"
"""Key of the config that changes only logs of a rank."""


def description_of(model: nn.Module, plan: Plan, axes: MeshAxes | None) -> Description:
    """Return the plan and the arguments of `wrap_model` as texts, which `run_alike` compares between ranks.

    Left out is what may differ between ranks: values of parameters, keys without effect, the key of logs.
    `axes` are those of the caller's mesh, None without a mesh.

    Raises:
        ConfigError: LOCAL_WORLD_SIZE in the environment is not a whole number from 1 on.
    """
    policy = plan.policy
    made = "made by wrap_model"
    layout = made if axes is None else _layout(axes)
    return {
        **settings_of(policy),
        "the mesh": layout,
        "whether one node has all ranks": str(is_one_node(policy)),
        **_parameters(model, plan, expected_shards(policy, None if axes is None else axes.fsdp)),
        **{f"module {fqn or 'root'}": _structure(module) for fqn, module in model.named_modules()},
        "the list of units": str(plan.units),
        "the run order of units": str(plan.run.forward_order() + plan.run.backward_order()),
        "the list of fp32 modules and tensors": str([*plan.fp32_regions.modules, *plan.fp32_regions.tensors]),
    }


def settings_of(policy: Policy) -> Description:
    """Return what is equal on all ranks of a job, whatever part of a model they have: versions, and the config."""
    values = policy.effective_values().items()
    return {
        "torch's version": torch.__version__,
        "zeroamp's version": __version__,
        **{path: json.dumps(value) for path, value in values if path != _OF_ONE_RANK},
    }


def ranks_per_node(policy: Policy) -> int | None:
    """Return the number of ranks per node, from the config or the launcher; None with "off", or if neither sets it.

    Raises:
        ConfigError: LOCAL_WORLD_SIZE in the environment is not a whole number from 1 on.
    """
    asked = policy.ranks_per_node
    if asked == "auto":
        return size_from_launcher(LOCAL_WORLD_SIZE)
    return None if asked == "off" else asked


def is_one_node(policy: Policy) -> bool:
    """Return whether all ranks of the job share a node, as far as is known. Raises as `ranks_per_node` does.

    Without a launcher's number, more ranks than this node has accelerators are on several nodes.
    """
    num_ranks, per_node = dist.get_world_size(), ranks_per_node(policy)
    if per_node is None and policy.ranks_per_node == "auto":
        return num_ranks <= (torch.accelerator.device_count() or num_ranks)
    return per_node is None or per_node >= num_ranks


def _layout(axes: MeshAxes) -> str:
    mesh, split = axes.whole, axes.describe()
    text = f"{mesh.mesh.tolist()} over {mesh.mesh_dim_names} on {mesh.device_type}"
    return f"{text} ({split})" if split else text


def _parameters(model: nn.Module, plan: Plan, num_shards: int) -> Description:
    """Return {FQN: shape, dtype, `requires_grad`, group, and the sharded dimension if it is not 0} of all parameters.

    Further FQNs of a tied parameter name the first one.
    """
    group_of = {param.fqn: group for group in plan.all_groups for param in group.params}
    dims = {param.fqn: param.shard_dim(num_shards) for group in plan.groups for param in group.params}
    first_name: dict[int, str] = {}
    found = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        first = first_name.setdefault(id(parameter), fqn)
        if first != fqn:
            found[fqn] = f"tied to {first}"
            continue
        group = group_of.get(fqn)
        unshards = f", of {group.name} in {short_name(group.key.param)}" if group else ""
        sends = f", reduced in {short_name(group.key.communication)}" if group else ""
        use = "trained" if parameter.requires_grad else "frozen"
        if group is not None and group.kind == "ignored":
            unshards, sends = ", ignored", ""
        where = " on the meta device" if parameter.is_meta else ""
        if isinstance(parameter, DTensor):
            where += f" as {parameter.placements} over {parameter.device_mesh.mesh_dim_names}"
        dim = f", sharded over dimension {dims[fqn]}" if dims.get(fqn) else ""
        found[fqn] = f"{tuple(parameter.shape)} {short_name(parameter.dtype)}{where}, {use}{unshards}{sends}{dim}"
    return found


def _structure(module: nn.Module) -> str:
    """Return a module's class, and for torch's own classes the settings: other classes may print text per process."""
    name = type(module).__name__
    return f"{name}({module.extra_repr()})" if type(module).__module__.startswith("torch.nn.") else name


def check_ranks_agree(model: nn.Module, axes: MeshAxes, ignored: Container[str] = ()) -> None:
    """Compare a checksum of every parameter between the ranks that must have the same values.

    These are all ranks. For a parameter that is distributed over a tensor or expert axis, they are the ranks with the
    same part. Each axis of several ranks costs one small collective. The `quant_state` of quantized parameters is
    compared too.

    Parameters on the meta device are skipped: they are initialised later, with the same values on all ranks. Parameters
    named in `ignored` may differ.

    Raises:
        WrapError: on all ranks, naming the first parameter that differs.
    """
    tensors: list[tuple[str, torch.Tensor]] = [*model.named_parameters(), *quantization_tensors(model)]
    by_mesh: dict[DeviceMesh, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        if not tensor.is_meta and name not in ignored:
            by_mesh.setdefault(replicas_of(tensor, axes), []).append((name, tensor))
    differing = [name for mesh, named in by_mesh.items() for name in _differing(named, mesh)]
    if not axes.is_plain:  # parts that only some ranks have may differ: the error is raised on all ranks
        count = torch.tensor([len(differing)], device=device_of(axes.whole))
        for group in axis_groups(axes.whole):
            dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
        differing = differing or ["A distributed parameter of other ranks"] * int(count)
    if differing:
        raise WrapError(
            f"{differing[0]} has values that differ between ranks (parameters that differ: {len(differing)}). "
            "Call torch.manual_seed with one seed on all ranks before building the model, load one checkpoint, or set "
            "zeroamp.sync_module_states to true: all ranks then get the first rank's values."
        )


@torch.no_grad()
def broadcast_module_states(model: nn.Module, axes: MeshAxes, ignored: Container[str] = ()) -> None:
    """Set all parameters and buffers to the values of the first rank, in place. All ranks call this.

    A parameter that is distributed over a tensor or expert axis gets the values of the first rank with the same part.

    Tensors are broadcast one by one, as bytes. A tensor on another device is copied to the mesh's device meanwhile.
    Tensors on the meta device are skipped: they are initialised later, with the same values on all ranks. Parameters
    named in `ignored` keep their values.
    """
    named = (*model.named_parameters(), *quantization_tensors(model))
    for tensor in (*(tensor for name, tensor in named if name not in ignored), *model.buffers()):
        if not tensor.is_meta and tensor.numel() > 0:
            _broadcast(local_part(tensor.detach()), replicas_of(tensor, axes))


def _broadcast(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    # No copy if the tensor is contiguous and on the device.
    flat = tensor.detach().to(device_of(mesh)).contiguous().reshape(-1)
    for group in axis_groups(mesh):  # from (0, 0) to all (i, 0), and from these to all (i, j)
        dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
    if flat.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def replicas_of(tensor: torch.Tensor, axes: MeshAxes) -> DeviceMesh:
    """Return the mesh of the ranks that have the same values of a tensor before FSDP2 shards it."""
    if num_shards_of(tensor) == 1:
        return axes.whole
    return axes.fsdp_of(is_expert=is_expert(tensor))


def _differing(named: list[tuple[str, torch.Tensor]], mesh: DeviceMesh) -> list[str]:
    """Return the names of the tensors whose values differ between ranks of a mesh."""
    sums = torch.stack([_checksum(tensor) for _, tensor in named])
    bounds = torch.cat([sums, -sums]).to(mesh.device_type)  # the maximum of -x is minus the minimum of x
    for group in axis_groups(mesh):
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = bounds[: len(named)], -bounds[len(named) :]
    return [named[index][0] for index in (largest != smallest).nonzero().flatten().tolist()]


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's elements, whose bits are read as integers: 0-D int64 on the CPU."""
    data = local_part(tensor.detach()).reshape(-1)
    return data.view(INTEGER_BY_NUM_BYTES[data.element_size()]).sum(dtype=torch.int64).cpu()


def check_integers(model: nn.Module, mesh: DeviceMesh, ignored: Container[str] = ()) -> None:
    """Raise WrapError for a parameter of an integer dtype (4-bit weights, for example) if FSDP2 cannot shard it."""
    named = ((fqn, parameter.dtype) for fqn, parameter in model.named_parameters() if fqn not in ignored)
    fqn, dtype = next(((fqn, dtype) for fqn, dtype in named if not dtype.is_floating_point), ("", None))
    if dtype is None or can_shard_integers(mesh):
        return
    raise WrapError(
        f"{fqn} is stored in {short_name(dtype)}, but FSDP2 of torch {torch.__version__} cannot shard integers. "
        "Install torch 2.13 or newer, or quantize with BitsAndBytesConfig(bnb_4bit_quant_storage=torch.bfloat16), "
        "which stores the same 4-bit values as bf16."
    )


def check_device(policy: Policy, device_type: str) -> None:
    """Raise ConfigError if `device_type` has no arithmetic in `policy.low_dtype`, or no autocast, as needed.

    On older GPUs without bfloat16 arithmetic torch would emulate it slowly: that raises too.
    """
    if policy.low_dtype is None:
        return
    key = {"autocast": "torch_autocast.dtype", "bf16": "bf16.enabled", "fp16": "fp16.enabled"}[policy.mode]
    found = f"{short_name(policy.low_dtype)} on device type {device_type}"
    if policy.mode == "autocast" and not torch.amp.is_autocast_available(device_type):
        raise ConfigError(
            f"{key} is {found}, which has no autocast (torch.amp.is_autocast_available is False). Use the block bf16 "
            "or fp16 instead."
        )
    is_bf16_on_cuda = device_type == "cuda" and policy.low_dtype == torch.bfloat16
    if is_bf16_on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name()
        raise ConfigError(
            f"{key} is {found} ({name}), which has no bfloat16 arithmetic: that needs compute capability 8.0 or "
            "newer. Use float16."
        )


def check_input_names(model: nn.Module, plan: Plan) -> None:
    """Raise WrapError for a name in `keep_inputs_in_fp32` that no unit's forward takes."""
    if not (asked := plan.policy.keep_inputs_in_fp32):
        return
    forwards = [model.get_submodule(unit).forward for unit in ("", *plan.units)]
    names = {name for forward in forwards for name in signature(forward).parameters}
    if missing := [name for name in asked if name not in names]:
        raise WrapError(
            f"zeroamp.keep_inputs_in_fp32 names {shown(missing[0])}, but the forwards of the model and its FSDP units "
            f"have no such argument. Their arguments are {some_of(sorted(names), 20)}. Correct the name."
        )

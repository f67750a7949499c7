"""Shards a model with FSDP2 according to a `Plan`: typed groups, units, root; and sets what each unit prefetches.

[Note: Which group starts prefetches]
FSDP2 starts a module's prefetches right after the module's own all-gather. A unit may have several groups: its own, and
those of its group holders. The group that is all-gathered last starts the prefetches, so that no group of the running
unit queues behind another unit. In the forward that is the last holder that was attached, because holders unshard after
the unit. In the backward it is the unit, because the hooks of the holders are on its outputs first. The holders then
prefetch the unit: with an empty list, FSDP2 would let each prefetch the group before it in its record of the forward.

Modules that run in another order than they are registered still get current parameters. A unit that is prefetched after
its forward stays unsharded until its backward. A unit that is prefetched after its backward is all-gathered once more
than needed; the copy is released at the end of the backward, or used by the forward of the next micro-batch.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from zeroamp.hooks.typed_groups import PlacementFn, group_policy, place_shards, shard_typed_group
from zeroamp.planning.group_dtypes import GroupKey, group_dtypes, unit_key
from zeroamp.planning.groups import GroupKind, GroupPlan, ParamPlan
from zeroamp.planning.mesh import device_of, ranks_of, shard_size
from zeroamp.planning.mesh_axes import MeshAxes
from zeroamp.planning.plan import Plan
from zeroamp.planning.schedule import backward_order, fits, live_units, reshards_after_forward
from zeroamp.policies.derived import Offload

logger = logging.getLogger("zeroamp")

_PACKS = "support_avx512bf16_for_cpu"  # of bitsandbytes' Linear4bit


def shard_model(model: nn.Module, plan: Plan, axes: MeshAxes) -> dict[str, FSDPModule]:
    """Apply `fully_shard`: all typed groups first (see `shard_typed_group`), then units bottom-up, then the root.

    Args:
        model: plain; trainable parameters are cast to fp32 group by group.
        plan: of the model.
        axes: the meshes.

    Returns:
        Name of a group -> its group holder, for the groups that are not a unit's own.
    """
    mesh = axes.fsdp
    unsharded = plan.empty_params if plan.replicated is None else (*plan.empty_params, *plan.replicated.params)
    _store(model, unsharded, mesh)
    for param in unsharded:  # FSDP2 moves only sharded parameters to the device
        parameter = model.get_parameter(param.fqn)
        parameter.grad = None  # sharding discards the gradients of the others
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device_of(mesh))
    live = live_units(plan)
    offload = offload_policy(plan.policy.offload, mesh.device_type)
    holders: dict[str, FSDPModule] = {}
    own_groups: dict[str, GroupPlan] = {}
    for group in plan.groups:
        if group.kind == "unit":
            own_groups[group.unit] = group
            continue
        _store(model, group.params, mesh)
        own_mesh = axes.fsdp_of(is_expert=group.is_expert)
        holders[group.name] = shard_typed_group(
            model,
            group.name,
            list({model.get_submodule(fqn): None for param in group.params for fqn in param.owner_fqns}),
            [param.fqn for param in group.params],
            mesh=own_mesh,
            mp_policy=_mp_policy(group.key, plan, own_mesh),
            reshard_after_forward=_reshard(group.kind, group.unit, plan, mesh, live),
            offload_policy=offload,
            shard_placement_fn=_placements(model, group, plan, own_mesh),
        )
    for unit in (*plan.units, ""):
        _store(model, own_groups[unit].params if unit in own_groups else (), mesh)
        reshard = _reshard("unit", unit, plan, mesh, live)
        is_expert = unit in own_groups and own_groups[unit].is_expert
        own_mesh = axes.fsdp_of(is_expert=is_expert)
        _shard_unit(model, unit, own_groups.get(unit), plan, own_mesh, reshard, offload)
    for module in model.modules():
        _keep_quantized(module, device_of(mesh))
    return holders


def _keep_quantized(module: nn.Module, device: torch.device) -> None:
    """Move a 4-bit layer's `QuantState` of bitsandbytes to the device, and retain the layout of its weight.

    FSDP2 moves buffers, but a `QuantState` is not a buffer. On CPUs with AVX512-BF16, the first forward in evaluation
    mode would pack the weight in another layout, and the next all-gather would restore the first one.
    """
    if (state := getattr(module, "quant_state", None)) is not None and hasattr(state, "to"):
        state.to(device)
    if getattr(module, _PACKS, False):
        setattr(module, _PACKS, False)


def _store(model: nn.Module, params: Iterable[ParamPlan], mesh: DeviceMesh) -> None:
    """Cast parameters to the dtype in which they are stored, and make them contiguous, as FSDP2 requires.

    Call before the `fully_shard` that shards them.

    Call group by group, so that at most one group is unsharded in fp32 at a time. The cast runs on the device of
    `mesh`, to which FSDP2 would move the parameters next. Parameters on the meta device stay there.
    """
    for param in params:
        parameter = model.get_parameter(param.fqn)
        if parameter.dtype != param.dtypes.stored:
            device = parameter.device if parameter.is_meta else device_of(mesh)
            parameter.grad = None  # it has the old dtype, and sharding discards gradients anyway
            parameter.data = parameter.data.to(device, param.dtypes.stored)
        if not parameter.is_contiguous():
            parameter.grad = None
            parameter.data = parameter.data.contiguous()


def cast_buffers(model: nn.Module, plan: Plan) -> None:
    """Cast floating-point buffers to `data_types.buffer_dtype`, except those in fp32 regions.

    A buffer that two modules share stays shared.
    """
    dtype = plan.policy.buffer_dtype
    if dtype is None:
        return
    cast: dict[int, torch.Tensor] = {}
    for fqn, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full_name = f"{fqn}.{name}" if fqn else name
            if buffer.is_floating_point() and plan.fp32_regions.pattern_of(full_name) is None:
                module._buffers[name] = cast.setdefault(id(buffer), buffer.to(dtype))


def _shard_unit(
    model: nn.Module,
    unit: str,
    group: GroupPlan | None,
    plan: Plan,
    mesh: DeviceMesh,
    reshard_after_forward: bool | int,
    offload: OffloadPolicy,
) -> None:
    module = model.get_submodule(unit)
    own = {id(model.get_parameter(param.fqn)) for param in group.params} if group else set()
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=_mp_policy(group.key if group else unit_key(plan.policy), plan, mesh),
        reshard_after_forward=reshard_after_forward,
        offload_policy=offload,
        shard_placement_fn=_placements(model, group, plan, mesh) if group else None,
        ignored_params={p for p in module.parameters() if id(p) not in own},
    )


def _placements(model: nn.Module, group: GroupPlan, plan: Plan, mesh: DeviceMesh) -> PlacementFn | None:
    num_shards = ranks_of(mesh).shards(plan.policy)
    return place_shards(model, {param.fqn: param.shard_dim(num_shards) for param in group.params})


def _mp_policy(key: GroupKey, plan: Plan, mesh: DeviceMesh) -> MixedPrecisionPolicy:
    dtypes = group_dtypes(key, plan.policy, ranks_of(mesh))
    return group_policy(dtypes.param, dtypes.unsharded_accumulate)


def _reshard(kind: GroupKind, unit: str, plan: Plan, mesh: DeviceMesh, live: set[str]) -> bool | int:
    """Return `reshard_after_forward` of a group: a number if it is resharded over a secondary partition (hpZ).

    The group of an embedding that is a unit of its own is not: it has no second all-gather.
    """
    reshards, size = reshards_after_forward(kind, unit, plan, live), plan.policy.hpz_partition_size
    has_partition = reshards and 1 < size < shard_size(mesh) and unit not in plan.own_units.lookups
    return size if has_partition else reshards


def offload_policy(offload: Offload, device_type: str) -> OffloadPolicy:
    """Return FSDP2's offload policy for `offload`. `device_type` is that of the mesh."""
    if not offload.to_cpu:
        return OffloadPolicy()
    if offload.pin_memory and device_type == "cpu":
        # FSDP2 would raise: page-locked memory needs an accelerator.
        logger.info("pin_memory has no effect without an accelerator: the shards are in ordinary memory.")
    return CPUOffloadPolicy(pin_memory=offload.pin_memory and device_type != "cpu")


def attach_prefetch(model: nn.Module, plan: Plan, holders: Mapping[str, FSDPModule]) -> None:
    """Set the modules that each unit and the root prefetch at stage 3. With a bucket of 0 elements FSDP2 decides.

    See [Note: Which group starts prefetches].

    `holders`: name of a group -> its group holder.
    """
    size = plan.policy.prefetch_bucket_size
    if plan.policy.stage != 3 or size <= 0:
        return
    gathered = group_modules(model, plan, holders)
    for unit, ahead in fits(plan.run.forward_order(), plan, size).items():
        prefetch_in_forward(gathered[unit], [gathered[other] for other in ahead])
    for unit, ahead in fits(backward_order(plan), plan, size).items():
        if ahead:
            prefetch_in_backward(gathered[unit], [gathered[other] for other in ahead])


def group_modules(model: nn.Module, plan: Plan, holders: Mapping[str, FSDPModule]) -> dict[str, list[FSDPModule]]:
    """Return each unit's module and group holders, in the order in which they were attached; "" is the root."""
    found = {unit: [cast(FSDPModule, model.get_submodule(unit))] for unit in ("", *plan.units)}
    for group in plan.groups:
        if group.name in holders:
            found[group.unit].append(holders[group.name])
    return found


def prefetch_in_forward(own: Sequence[FSDPModule], ahead: Iterable[Sequence[FSDPModule]]) -> None:
    """Let a unit, with the modules `own`, prefetch others in the forward: [Note: Which group starts prefetches]."""
    FSDPModule.set_modules_to_forward_prefetch(own[-1], [module for modules in ahead for module in modules])


def prefetch_in_backward(own: Sequence[FSDPModule], ahead: Iterable[Sequence[FSDPModule]]) -> None:
    """Let a unit, with the modules `own`, prefetch other units in the backward."""
    prefetched = [module for modules in ahead for module in modules[::-1]]
    FSDPModule.set_modules_to_backward_prefetch(own[0], prefetched)
    for holder in own[1:]:
        FSDPModule.set_modules_to_backward_prefetch(holder, [own[0]] if prefetched else [])

"""Applies FSDP2 to a model as a `Plan` says: typed groups, units, root."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from zeroamp.hooks import group_policy, shard_typed_group
from zeroamp.mesh import device_of
from zeroamp.plan import GroupKind, GroupPlan, Plan
from zeroamp.policies.accumulation import unsharded_accumulation
from zeroamp.policies.policy import Policy


def shard_model(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> dict[str, FSDPModule]:
    """Apply `fully_shard`: all typed groups first (see `shard_typed_group`), then units bottom-up, then the root.

    Returns:
        The holders of the groups that are not a unit's own, by group name.
    """
    for param in plan.empty_params:  # FSDP2 moves only what it shards
        empty = model.get_parameter(param.fqn)
        empty.data = empty.data.to(device_of(mesh))
    holders: dict[str, FSDPModule] = {}
    own_groups: dict[str, GroupPlan] = {}
    for group in plan.groups:
        if group.kind == "unit":
            own_groups[group.unit] = group
            continue
        holders[group.name] = shard_typed_group(
            model,
            group.name,
            list({model.get_submodule(fqn): None for param in group.params for fqn in param.owner_fqns}),
            [param.fqn for param in group.params],
            mesh=mesh,
            mp_policy=group_policy(group.gather, unsharded_accumulation(plan.policy)),
            reshard_after_forward=_reshard_after_forward(group.kind, group.unit, plan.policy),
        )
    for unit in (*plan.units, ""):
        _shard_unit(model, unit, own_groups.get(unit), plan.policy, mesh)
    _check_sharded(model)
    return holders


def _check_sharded(model: nn.Module) -> None:
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.numel() > 0 and not isinstance(parameter, DTensor):
            raise AssertionError(f"expected {fqn} to be sharded, got a {type(parameter).__name__}")


def _shard_unit(model: nn.Module, unit: str, group: GroupPlan | None, policy: Policy, mesh: DeviceMesh) -> None:
    module = model.get_submodule(unit)
    own = {id(model.get_parameter(param.fqn)) for param in group.params} if group else set()
    # At the root only: inner modules get what the model hands them, rotary embeddings in fp32 for example.
    casts_inputs = unit == "" and policy.mode in ("bf16", "fp16")
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=group_policy(
            group.gather if group else policy.gather_dtype,
            unsharded_accumulation(policy),
            cast_forward_inputs=casts_inputs,
        ),
        reshard_after_forward=_reshard_after_forward("unit", unit, policy),
        ignored_params={parameter for parameter in module.parameters() if id(parameter) not in own},
    )


def _reshard_after_forward(kind: GroupKind, unit: str, policy: Policy) -> bool:
    # The root's groups stay: backward starts with them. So does the model-wide group: it is gathered once per step.
    return policy.stage == 3 and unit != "" and kind != "model-wide"

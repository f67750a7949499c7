"""`wrap_model`: from a model and a `Policy` to an FSDP2 model with typed groups, wire dtypes and autocast."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.utils.hooks import RemovableHandle

from zeroamp.collectives import attach_collectives
from zeroamp.consistency import check_ranks_agree
from zeroamp.hooks import (
    AutocastHook,
    BackwardGuard,
    ReceiveBuffers,
    ShardAccumulator,
    Traffic,
    attach_typed_group,
    group_policy,
    shard_typed_group,
    typed_group_hooks,
    zero_fill_unused,
)
from zeroamp.materialize import materialize
from zeroamp.mesh import mesh_for_stage
from zeroamp.plan import GroupKind, GroupPlan, Plan, build_plan
from zeroamp.policies.errors import WrapError, describe
from zeroamp.policies.policy import Policy
from zeroamp.policies.wrap import AutoWrapPolicy

_STATE = "_zeroamp_state"


@dataclass(kw_only=True, slots=True)
class WrapState:
    """What `wrap_model` attached to a model; the step and the reports read it."""

    plan: Plan
    mesh: DeviceMesh
    traffic: Traffic
    """What the collectives moved since it was last reset."""
    holders: dict[str, FSDPModule] = field(default_factory=dict)
    """Group name -> holder, for the groups that are not a unit's own."""
    autocast: AutocastHook | None = None
    guard: BackwardGuard | None = None
    shard_accumulator: ShardAccumulator | None = None
    handles: list[RemovableHandle] = field(default_factory=list)


def wrap_model(
    model: nn.Module,
    policy: Policy,
    mesh: DeviceMesh | None = None,
    auto_wrap_policy: AutoWrapPolicy = None,
) -> FSDPModule:
    """Shard `model` in place with FSDP2, as `policy` says, and return it (the same object, now an `FSDPModule`).

    Build the optimizer after this call: the parameters become sharded DTensors.

    Args:
        model: on any device; parameters on the meta device are materialised and initialised without a full copy.
        policy: from `policy_from_config`.
        mesh: 1-D (shard) or 2-D (replicate, shard) for HSDP; all ranks in one axis by default.
        auto_wrap_policy: which modules are units, see `zeroamp.policies.find_units`.

    Raises:
        WrapError: the model, mesh or wrap policy cannot be wrapped as asked.
        ConfigError: the policy does not fit the model or the device.
    """
    _refuse_unusable(model)
    plan = build_plan(model, policy, auto_wrap_policy)
    mesh = mesh_for_stage(policy.stage, mesh)
    check_ranks_agree(model, mesh)
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    state = WrapState(plan=plan, mesh=mesh, traffic=Traffic(enabled=policy.count_traffic))
    _shard(model, state)
    _attach(model, state)
    if is_meta:
        materialize(model, mesh, _device(mesh))
    setattr(model, _STATE, state)
    return cast(FSDPModule, model)


def wrap_state(model: nn.Module) -> WrapState:
    """Return what `wrap_model` recorded on `model`.

    Raises:
        WrapError: `model` is not a wrapped root.
    """
    state = getattr(model, _STATE, None)
    if not isinstance(state, WrapState):
        raise WrapError(
            describe(
                "model", f"a {type(model).__name__} that is not wrapped", "what wrap_model returned", "Wrap it first."
            )
        )
    return state


def register_forward_method(model: nn.Module, method_name: str) -> None:
    """Let `model.method_name(...)` gather parameters and run under autocast, as `forward` does.

    For entry points other than `forward` that use submodules directly. A method that calls the model itself, as
    `generate` does, needs no registration. Builds on FSDP2's `register_fsdp_forward_method`, which knows neither typed
    groups nor autocast.
    """
    state = wrap_state(model)
    method = getattr(model, method_name)
    at_root = [holder for group in state.plan.groups if not group.unit and (holder := state.holders.get(group.name))]

    hooks = [typed_group_hooks(holder) for holder in at_root]

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        for pre_forward, _ in hooks:
            args, kwargs = pre_forward(model, args, kwargs)
        with nullcontext() if state.autocast is None else state.autocast.context():
            output = method(*args, **kwargs)
        for _, post_forward in reversed(hooks):
            output = post_forward(model, args, output)
        return output

    setattr(model, method_name, run)
    register_fsdp_forward_method(model, method_name)


def _refuse_unusable(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise WrapError(describe("model", f"a {type(model).__name__}", "a torch.nn.Module", "Pass the module itself."))
    wrapped = next((fqn for fqn, module in model.named_modules() if isinstance(module, FSDPModule)), None)
    if wrapped is not None:
        raise WrapError(
            describe(
                wrapped or "the root",
                "a module that fully_shard was applied to",
                "a model that is not sharded yet",
                "Wrap once.",
            )
        )


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _shard(model: nn.Module, state: WrapState) -> None:
    """Apply `fully_shard`: all typed groups first (see `shard_typed_group`), then units bottom-up, then the root."""
    for param in state.plan.empty_params:  # FSDP2 moves only what it shards
        empty = model.get_parameter(param.fqn)
        empty.data = empty.data.to(_device(state.mesh))
    own_groups: dict[str, GroupPlan] = {}
    for group in state.plan.groups:
        if group.kind == "unit":
            own_groups[group.unit] = group
            continue
        state.holders[group.name] = shard_typed_group(
            model,
            group.name,
            list({model.get_submodule(fqn): None for param in group.params for fqn in param.owner_fqns}),
            [param.fqn for param in group.params],
            mesh=state.mesh,
            mp_policy=group_policy(group.gather, _unsharded_accumulation(state.plan.policy)),
            reshard_after_forward=_reshard_after_forward(group.kind, group.unit, state.plan.policy),
        )
    for unit in (*state.plan.units, ""):
        _shard_unit(model, unit, own_groups.get(unit), state)


def _shard_unit(model: nn.Module, unit: str, group: GroupPlan | None, state: WrapState) -> None:
    policy = state.plan.policy
    module = model.get_submodule(unit)
    own = {id(model.get_parameter(param.fqn)) for param in group.params} if group else set()
    # At the root only: inner modules get what the model hands them, rotary embeddings in fp32 for example.
    casts_inputs = unit == "" and policy.mode in ("bf16", "fp16")
    fully_shard(
        module,
        mesh=state.mesh,
        mp_policy=group_policy(
            group.gather if group else policy.gather_dtype,
            _unsharded_accumulation(policy),
            cast_forward_inputs=casts_inputs,
        ),
        reshard_after_forward=_reshard_after_forward("unit", unit, policy),
        ignored_params={parameter for parameter in module.parameters() if id(parameter) not in own},
    )


def _unsharded_accumulation(policy: Policy) -> torch.dtype:
    # At stages 2 and 3 nothing accumulates unsharded; a sum over micro-batches is then `ShardAccumulator`'s.
    return policy.grad_accum_dtype if policy.stage < 2 else torch.float32


def _reshard_after_forward(kind: GroupKind, unit: str, policy: Policy) -> bool:
    # The root's groups stay: backward starts with them. So does the model-wide group: it is gathered once per step.
    return policy.stage == 3 and unit != "" and kind != "model-wide"


def _attach(model: nn.Module, state: WrapState) -> None:
    policy = state.plan.policy
    buffers = ReceiveBuffers()
    for group in state.plan.groups:
        hook_at = model.get_submodule(group.unit)
        holder = state.holders.get(group.name)
        if holder is not None:
            state.handles += attach_typed_group(holder, hook_at)
        attach_collectives(cast(FSDPModule, holder or hook_at), group, state.plan, state.mesh, state.traffic, buffers)
    zero_fill_unused(cast(FSDPModule, model))
    if policy.mode == "autocast":
        state.autocast = AutocastHook(state.mesh.device_type, policy.gather_dtype)
        state.handles += state.autocast.attach(model)
    if reasons := _needs_train_step(policy):
        state.guard = BackwardGuard(reasons)
        state.handles.append(state.guard.attach(model))
    if policy.stage >= 2 and policy.grad_accum_dtype != torch.float32 and policy.gradient_accumulation_steps > 1:
        state.shard_accumulator = ShardAccumulator(policy.grad_accum_dtype)
        state.handles += [state.shard_accumulator.attach(p) for p in model.parameters() if p.requires_grad]


def _needs_train_step(policy: Policy) -> str:
    """Say which keys of the config a plain `loss.backward(); optimizer.step()` would leave out; "" for none."""
    keys = {
        "gradient_accumulation_steps": policy.gradient_accumulation_steps > 1,
        "gradient_clipping": policy.gradient_clipping > 0,
    }
    reasons = [f"{key} {getattr(policy, key)}" for key, applies in keys.items() if applies]
    return " and ".join([*reasons, "float16, which scales the loss"] if policy.low_dtype == torch.float16 else reasons)

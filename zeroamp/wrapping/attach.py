"""Attaches zeroamp's hooks to a model that FSDP2 has sharded."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeroamp.hooks._torch.dispatch import is_in_backward
from zeroamp.hooks._torch.fsdp import gather_in_background
from zeroamp.hooks.collectives.gloo_exit import pause_before_exit
from zeroamp.hooks.group_gradients import by_module, refuse_replaced
from zeroamp.hooks.guards import (
    BackwardGuard,
    attach_gradient_guard,
    explain_sharded_reads,
    refuse_autocast_off,
    refuse_sharded,
    watch_create_graph,
)
from zeroamp.hooks.precision.autocast import (
    cache_with_gradients,
    enter_autocast,
    refuse_autocast,
    warn_of_other_autocast,
)
from zeroamp.hooks.precision.module_casts import RoundedInputs, cast_inputs, run_in_fp32
from zeroamp.hooks.precision.outputs import Fp32Outputs
from zeroamp.hooks.root_forward import reshard_after_no_grad
from zeroamp.hooks.typed_groups import typed_group_hooks
from zeroamp.hooks.unit_hooks import UnitHooks, return_no_view
from zeroamp.planning.parameter_uses import modules_around
from zeroamp.planning.plan import Plan
from zeroamp.policies.accumulation import sharded_accumulation
from zeroamp.policies.extensions import Extension
from zeroamp.policies.safe_modules import DEFAULT_SAFE_MODULES, resolve_safe_classes
from zeroamp.wrapping.collectives import attach_collectives
from zeroamp.wrapping.refused_calls import refuse_calls
from zeroamp.wrapping.shard import attach_prefetch
from zeroamp.wrapping.state import WrapState


def attach_hooks(model: nn.Module, state: WrapState) -> None:
    """Give the model's groups their collectives, and its modules their hooks: see `zeroamp.hooks.unit_hooks`."""
    policy = state.plan.policy
    gradients = by_module(state.gradients)
    for group in state.plan.groups:
        group_module = state.holders.get(group.name) or cast(FSDPModule, model.get_submodule(group.unit))
        attach_collectives(group_module, group, state, gradients[group_module])
    if state.mesh.device_type == "cpu":
        gather_in_background(cast(FSDPModule, model))
        pause_before_exit()
    attach_prefetch(model, state.plan, state.holders)
    hooks = UnitHooks()
    _add_root_forward(model, state, hooks)
    if state.containers.copies_of_root:
        hooks.add(model, "take root's inputs", state.containers.take_inputs_of_root)
    rounded = RoundedInputs()
    for unit, module in state.units.items():
        hooks.add(module, "end loans", state.containers.end_forward)
        if (dtype := state.plan.input_dtype(unit)) is not None:
            keeps = policy.keep_inputs_in_fp32
            hooks.add(module, "cast inputs", cast_inputs(dtype, state.containers, module.forward, keeps, rounded))
    for group in state.plan.groups:
        if (holder := state.holders.get(group.name)) is not None:
            pre_forward, post_forward = typed_group_hooks(holder)
            hooks.add(state.units[group.unit], "unshard typed groups", pre_forward)
            hooks.add(state.units[group.unit], "reshard typed groups", post_forward)
    _refuse_calls_from_outside(model, state.plan, hooks)
    if policy.mode == "autocast":
        _refuse_autocast_off(model, state, hooks)
    # Under autocast a region may return fp32, because the ops after it cast their inputs.
    output_dtype = None if policy.mode == "autocast" else policy.low_dtype
    for module in state.plan.fp32_regions.modules_of(model):
        run_in_fp32(module, state.mesh.device_type, output_dtype)
    if sharded_accumulation(policy) != torch.float32:
        from zeroamp.accumulation.shard_accumulator import round_sums

        round_sums(state)
    _add_own_units(model, state, hooks)
    hooks.register()
    refuse_calls(model, state.axes, lambda: state.root_forward.runs_model)


def _add_root_forward(model: nn.Module, state: WrapState, hooks: UnitHooks) -> None:
    """Add the context managers that run around the root's forward, and the hooks that enter them."""
    policy, forward, device_type = state.plan.policy, state.root_forward, state.mesh.device_type
    forward.on_output(watch_create_graph)
    forward.add("outer autocast", refuse_replaced(state.gradients))
    forward.add("reshard", reshard_after_no_grad(model))
    forward.add("reshard", state.containers.around_root)
    forward.add("outer autocast", cache_with_gradients)
    if policy.low_dtype is not None:
        outputs = Fp32Outputs(device_type, policy.low_dtype)
        forward.add("outer autocast", outputs.before)
        forward.change_output(outputs.after)
    if policy.mode == "autocast":
        forward.add("outer autocast", warn_of_other_autocast(device_type, policy.param_dtype))
        forward.add("autocast", enter_autocast(device_type, policy.param_dtype))
    elif policy.external_autocast == "error":
        forward.add("outer autocast", refuse_autocast(device_type, policy.mode))
    if reasons := needs_train_step(state.plan, state.extensions):
        forward.on_output(BackwardGuard(partial(_plain_backward, state, reasons), partial(_leaves, model, state)).watch)
    forward.add_hooks(model, hooks)


def _leaves(model: nn.Module, state: WrapState) -> Iterator[torch.Tensor]:
    """Yield the leaves of autograd whose gradients only a `TrainStep` may compute: unsharded and 0-D parameters."""
    if state.step.is_scheduled:
        return
    for group in state.gradients:
        yield from group.leaves
    if state.plan.replicated is not None:
        yield from (model.get_parameter(param.fqn) for param in state.plan.replicated.params)


def _add_own_units(model: nn.Module, state: WrapState, hooks: UnitHooks) -> None:
    """Set what differs between an embedding or a head and other units: see `zeroamp.policies.auto_wrap`."""
    own_units, forward, gradients = state.plan.own_units, state.root_forward, by_module(state.gradients)
    for fqn in own_units:
        module = model.get_submodule(fqn)
        names = [group.name for group in state.plan.groups if group.unit == fqn]
        for group_module in (state.holders.get(name, cast(FSDPModule, module)) for name in names):
            gradients[group_module].reduce_once()
            if fqn in own_units.lookups:
                group_module.set_unshard_in_backward(False)
        weight = next(name for name, _ in module.named_parameters())
        check = refuse_sharded(model, fqn, f"{fqn}.{weight}", unless=lambda: forward.runs_model or is_in_backward())
        hooks.add(module, "refuse sharded", check)
        hooks.add(module, "return no view", return_no_view)
        for parameter in (each for each in module.parameters() if each.requires_grad):
            attach_gradient_guard(parameter, fqn)
    forward.add("reshard", explain_sharded_reads(model, tuple(own_units)))


def _plain_backward(state: WrapState, reasons: str) -> str:
    """Return the text of the error for a plain backward. `reasons`: of `needs_train_step`."""
    if state.step.trained_by is not None:
        return f"loss.backward() was called on a model that {state.step.trained_by}."
    if state.axes.stages is not None:
        return (
            f"schedule.step was called, but {reasons}, which a schedule ignores. Build train = "
            "zeroamp.PipelineStep(parts, optimizer), pass loss_fn=train.wrap_loss(loss_fn) to the schedule, and call "
            "train.step() after schedule.step()."
        )
    return (
        f"loss.backward() was called, but {reasons}, which a plain backward ignores. Call "
        "zeroamp.TrainStep(model, optimizer).backward(loss), then .step()."
    )


def needs_train_step(plan: Plan, extensions: Iterable[Extension]) -> str:
    """Return as text what a plain `loss.backward(); optimizer.step()` would ignore. "" if it ignores nothing."""
    policy = plan.policy
    keys = {
        "gradient_accumulation_steps": policy.gradient_accumulation_steps > 1,
        "gradient_clipping": policy.gradient_clipping > 0,
        "check_grad_overflow": policy.check_grad_overflow,
        "skip_nonfinite_steps": policy.skip_nonfinite_steps,
    }
    reasons = [f"{key} {getattr(policy, key)}" for key, applies in keys.items() if applies]
    reasons += [extension.needs_train_step for extension in extensions if extension.needs_train_step]
    if policy.low_dtype == torch.float16:
        reasons.append("float16, which scales the loss")
    if plan.replicated is not None:
        return f"the model has the 0-D parameter {plan.replicated.params[0].fqn}, which the step averages over ranks"
    return f"the config has {' and '.join(reasons)}" if reasons else ""


def _refuse_calls_from_outside(model: nn.Module, plan: Plan, hooks: UnitHooks) -> None:
    """Guard the modules that a user may call outside of the root's forward: units, modules around them, and siblings.

    The guard of a module checks one parameter. Neither a hook on the module nor one on a module inside it unshards that
    parameter.
    """
    modules = dict(model.named_modules(remove_duplicate=False))  # a module may have several names
    around_units = {"", *(outer for unit in plan.units for outer in modules_around(unit))}
    guarded: dict[str, str] = {}
    for group in plan.groups:
        unsharding = {modules[fqn] for fqn in (*modules_around(group.unit), group.unit)}
        for name in (name for param in group.params for name in (param.fqn, *param.aliases)):
            for fqn in modules_around(name):
                if modules[fqn] not in unsharding and fqn.rpartition(".")[0] in around_units:
                    guarded.setdefault(fqn, name)
    for fqn, name in guarded.items():
        hooks.add(modules[fqn], "refuse sharded", refuse_sharded(model, fqn, name))


def _refuse_autocast_off(model: nn.Module, state: WrapState, hooks: UnitHooks) -> None:
    """Guard the safe modules against forwards with autocast off."""
    low = [param for param in state.plan.params if param.dtypes.param != param.dtypes.stored]
    may_cast = any(extension.model_may_cast for extension in state.extensions)
    classes = resolve_safe_classes(DEFAULT_SAFE_MODULES, model) if may_cast else (nn.Module,)
    for fqn in sorted({owner for param in low for owner in param.owner_fqns}):
        module = model.get_submodule(fqn)
        if isinstance(module, classes):
            hooks.add(module, "refuse autocast off", refuse_autocast_off(fqn, state.mesh.device_type))

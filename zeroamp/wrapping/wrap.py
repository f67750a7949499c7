"""`wrap_model`: shards a model with FSDP2, with the parameter groups, dtypes and autocast of a `Policy`."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from zeroamp.hooks._torch.fsdp import PreForward
from zeroamp.hooks.callers_containers import CallersContainers
from zeroamp.hooks.collectives.collective_calls import IssuedInStep
from zeroamp.hooks.collectives.traffic import Traffic
from zeroamp.hooks.group_gradients import follow_gradients
from zeroamp.hooks.module_changes import ModuleChanges
from zeroamp.hooks.precision.module_casts import cast_inputs
from zeroamp.hooks.typed_groups import typed_group_hooks
from zeroamp.hooks.unit_hooks import return_no_views
from zeroamp.planning.mesh import (
    current_device_type,
    device_of,
    device_of_type,
    is_first_rank,
    mesh_for_stage,
    process_group,
    refuse_partition,
    shard_device,
    shard_size,
    start_process_group,
)
from zeroamp.planning.mesh_axes import MeshAxes, find_axes, plain_axes, ranks_of_axes
from zeroamp.planning.plan import Plan, build_plan
from zeroamp.planning.rank_device import choose_device
from zeroamp.policies.accumulation import unsharded_accumulation
from zeroamp.policies.auto_wrap import AutoWrapPolicy
from zeroamp.policies.batch_sizes import check_batch_sizes
from zeroamp.policies.errors import WrapError, describe, shown
from zeroamp.policies.extensions import of_class
from zeroamp.policies.policy import ConfigLike, Policy, as_policy
from zeroamp.wrapping.attach import attach_hooks
from zeroamp.wrapping.collectives import compile_sums
from zeroamp.wrapping.extensions import WrapExtension
from zeroamp.wrapping.fsdp_methods import FsdpMethods
from zeroamp.wrapping.job_log import log_once_per_job
from zeroamp.wrapping.model_checks import (
    broadcast_module_states,
    check_device,
    check_input_names,
    check_integers,
    check_ranks_agree,
    description_of,
    is_one_node,
    settings_of,
)
from zeroamp.wrapping.optimizer_hooks import parameters_before, watch_optimizers
from zeroamp.wrapping.run_alike import Description, run_alike
from zeroamp.wrapping.shard import cast_buffers, shard_model
from zeroamp.wrapping.state import MeshNodes, WrapState, record_state, wrap_state
from zeroamp.wrapping.step_state import StepState
from zeroamp.wrapping.summary import (
    describe_master_weights,
    describe_random_blocks,
    describe_uncast_experts,
    size_summary,
)

logger = logging.getLogger("zeroamp")

M = TypeVar("M", bound=nn.Module)


def wrap_model(
    model: M,
    policy: Policy | ConfigLike,
    mesh: DeviceMesh | None = None,
    auto_wrap_policy: AutoWrapPolicy = None,
    example_inputs: Any = None,
    ignored_params: set[nn.Parameter] | None = None,
    *,
    materialize: bool = True,
) -> M:
    """Shard `model` in place with FSDP2 according to `policy`. Return the same object, now an `FSDPModule`.

    All ranks call this. Build the optimizer after this call, because the parameters become sharded DTensors. The first
    rank logs sizes and the time that it took (logger "zeroamp", level INFO; to stderr if you configured no logging). If
    there is no process group, this call initialises one from torchrun's environment. In a plain `python script.py` it
    initialises a group of one rank.

    The wrapped model returns low-precision tensors in fp32, for a loss outside of its forward. It returns them as
    computed if an autocast of the caller surrounds the forward, or if the output has a loss: `output.loss`, the key
    "loss", or the first item of a tuple. See docs/losses.md.

    Args:
        model: on any device; parameters on the meta device are materialised and initialised without a full copy.
            Trainable parameters in bf16 or fp16 are sharded in fp32 (master weights). Frozen ones keep their dtype.
        policy: from `policy_from_config`; or a config or the path of one, without "auto" values.
        mesh: 1-D (shard) or 2-D (replicate, shard) for HSDP. None: all ranks in one axis, or in two with
            `zeroamp.dp_replicate_size`. With context, tensor or expert parallelism, the whole named mesh, such as
            ("dp", "cp", "tp"), or the slice of it over which FSDP2 shards: `mesh["dp"]`. See docs/meshes.md.
        auto_wrap_policy: the modules that become units, see `zeroamp.policies.find_units`.
        example_inputs: for `lower_precision_safe_modules` "auto": a tuple of positional arguments, a mapping of keyword
            arguments, or a tensor, on any device. None stands for a transformers model's `dummy_inputs`.
        ignored_params: parameters of the model that zeroamp and FSDP2 do not shard, cast or move to the device, and
            whose gradients they do not reduce. `TrainStep` scales and clips those gradients with the others. See
            docs/peft.md.
        materialize: False leaves parameters and buffers of a meta-device model on the meta device. Give them values
            before the optimizer is built: by `model.to_empty(device=...)` and the model's own initialisation, which
            gets sharded DTensors, or by `load_hf`. No effect on a model that is not on the meta device.

    Raises:
        WrapError: the model, the mesh or the wrap policy is not supported, or ranks differ in their arguments or
            parameters.
        ConfigError: the config is not valid, or does not fit the model, the ranks or the device.
        PeerError: another rank ended, or did not call `wrap_model`.

    Examples:
        >>> policy = zeroamp.policy_from_config({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}})
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        >>> model = zeroamp.wrap_model(model, policy, auto_wrap_policy={"Linear"})
        >>> optimizer = torch.optim.AdamW(model.parameters())  # after wrapping
        >>> type(model[0].weight.data).__name__
        'DTensor'
    """
    begin, name = time.perf_counter(), type(model).__name__
    log_once_per_job()
    _refuse_other_mesh(mesh)
    if mesh is None and not dist.is_initialized():
        _refuse_unusable(model)
        as_policy(policy)  # raises before there is a process group
        start_process_group()
    device_type = current_device_type() if mesh is None else mesh.device_type
    choose_device(device_type)  # before the first collective
    axes = find_axes(model, mesh) if isinstance(model, nn.Module) else None
    world = None if axes is None else process_group(axes.whole)

    def build() -> Plan:
        asked = replace(as_policy(policy), is_of_pipeline=axes is not None and axes.stages is not None)
        check_device(asked, device_type)
        return build_plan(model, asked, auto_wrap_policy, example_inputs, device_type, ignored_params)

    plan = _agreed_plan(model, build, axes, world, device_type, materialize=materialize)
    before = parameters_before(model)
    axes = _axes_of_stage(plan.policy, mesh, axes)
    _check_and_equalise(model, plan, axes)
    state = _shard(model, plan, axes, world, materialize=materialize)
    _attach(model, state)
    record_state(model, state)
    watch_optimizers(model, before)
    if is_first_rank(axes.whole):
        _log_summary(state, name, time.perf_counter() - begin)
    return model


def _agreed_plan(
    model: nn.Module,
    build: Callable[[], Plan],
    axes: MeshAxes | None,
    world: dist.ProcessGroup | None,
    device_type: str,
    *,
    materialize: bool,
) -> Plan:
    """Return the plan of `build`. Raises on all ranks if it raises on one, or if the plans differ.

    `axes`: those of the caller's mesh; None if there is no mesh. `world`: see `WrapState`.
    """
    if axes is not None:
        log_once_per_job(axes.whole)

    def planned() -> tuple[Plan, Description]:
        _refuse_unusable(model)
        plan = build()
        check_input_names(model, plan)
        for extension in of_class(plan.extensions, WrapExtension):
            extension.check_model(model, plan)
        if axes is not None and (axes.stages is not None or not axes.is_data_only):
            from zeroamp.meshes.refused_meshes import refuse_combinations

            refuse_combinations(model, plan, axes, materialize=materialize)
        return plan, description_of(model, plan, axes)

    # Before other communication: ranks that differ would wait for each other, or abort in the backend.
    agree = partial(run_alike, what="wrap_model", error_type=WrapError, device=device_of_type(device_type))
    same = "Pass the same model, policy, mesh, auto_wrap_policy, example_inputs and ignored_params on all ranks."
    if axes is None or axes.stages is None:
        return agree(planned, remedy=same, group=world)

    def agreed_on_part() -> tuple[Plan, Description]:
        plan = agree(planned, remedy=same, group=world)
        return plan, settings_of(plan.policy)

    of_stages = "Pass the same policy on all stages of the pipeline, and wrap as many parts on each of their ranks."
    return agree(agreed_on_part, remedy=of_stages, group=axes.stages.get_group())


def _axes_of_stage(policy: Policy, mesh: DeviceMesh | None, given: MeshAxes | None) -> MeshAxes:
    """Return the axes over which the policy's stage shards and sums. `given`: those of the caller's mesh, if any."""
    mesh = mesh_for_stage(policy.stage, mesh if given is None else given.fsdp, policy.dp_replicate_size)
    axes = plain_axes(mesh) if given is None else given.with_fsdp(mesh)
    refuse_partition(policy, shard_size(mesh))
    total, micro = policy.train_batch_size, policy.train_micro_batch_size_per_gpu
    check_batch_sizes(total, micro, policy.gradient_accumulation_steps, axes.num_data)
    return axes


def _check_and_equalise(model: nn.Module, plan: Plan, axes: MeshAxes) -> None:
    """Check the model on these axes. Ranks must have the same values, or get the first rank's if the config asks."""
    for extension in of_class(plan.extensions, WrapExtension):
        extension.check_mesh(model, plan, axes)
    check_integers(model, axes.fsdp, plan.ignored_fqns)
    if plan.policy.sync_module_states:
        broadcast_module_states(model, axes, plan.ignored_fqns)
    else:
        check_ranks_agree(model, axes, plan.ignored_fqns)
    if is_first_rank(axes.whole) and (line := describe_master_weights(model, plan)):
        logger.info("%s", line)


def _shard(
    model: nn.Module, plan: Plan, axes: MeshAxes, world: dist.ProcessGroup | None, *, materialize: bool
) -> WrapState:
    """Shard the parameters, cast the buffers, and give a model on the meta device values if `materialize`."""
    policy, mesh = plan.policy, axes.fsdp
    cast_buffers(model, plan)
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    changes = ModuleChanges()
    with changes.noting(model.modules()):
        return_no_views(model.get_submodule(fqn) for fqn in plan.own_units)
        holders = shard_model(model, plan, axes)
    if is_meta and materialize:
        from zeroamp.weights.materialize import materialize_model

        materialize_model(model, mesh, device_of(mesh), shard_device(policy, mesh))
    nodes, traffic = MeshNodes(), Traffic()
    containers = CallersContainers(copies_of_root=mesh.device_type != "cpu")
    issued = IssuedInStep(frozenset(group.name for group in plan.groups if group.unit in plan.own_units))
    # Of all ranks, not of the mesh: on nodes of different sizes, all ranks must decide alike.
    if policy.reduce_accumulate_dtype == "fp32" and not is_one_node(policy):
        from zeroamp.two_level.layout import nodes_of_mesh

        nodes = nodes_of_mesh(policy, mesh, world)
    return WrapState(
        root=model,
        plan=plan,
        mesh=mesh,
        axes=axes,
        world=world,
        nodes=nodes,
        extensions=plan.extensions,
        holders=holders,
        units={unit: model.get_submodule(unit) for unit in ("", *plan.units)},
        containers=containers,
        gradients=follow_gradients(model, containers),
        traffic=traffic,
        issued=issued,
        listeners=[traffic] if axes.whole.size() == 1 else [traffic, issued],
        step=StepState(accumulates_in=unsharded_accumulation(policy)),
        changes=changes,
    )


def _attach(model: nn.Module, state: WrapState) -> None:
    with state.changes.noting(model.modules()):
        attach_hooks(model, state)
        compile_sums(state)
        for extension in of_class(state.extensions, WrapExtension):
            extension.attach(model, state)
        FsdpMethods(state).attach()


def _log_summary(state: WrapState, name: str, seconds: float) -> None:
    plan, ranks = state.plan, ranks_of_axes(state.axes)
    if warning := describe_uncast_experts(plan):
        logger.warning("%s", warning)
    if state.axes.whole.size() > 1 and (warning := describe_random_blocks(state.root, plan)):
        logger.warning("%s", warning)
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", size_summary(plan, ranks, name=name, seconds=seconds))


def register_forward_method(model: nn.Module, method_name: str) -> None:
    """Make `model.method_name(...)` unshard parameters and run under autocast, as `forward` does.

    For methods other than `forward` that use submodules directly. A method that calls the model itself, as `generate`
    does, need not be registered. FSDP2's `register_fsdp_forward_method` alone would unshard only one of the root's
    parameter groups, and would not enter autocast.

    Raises:
        WrapError: the model is not wrapped.
        AttributeError: the model has no such method.
    """
    state = wrap_state(model)
    at_root = [holder for group in state.plan.groups if not group.unit and (holder := state.holders.get(group.name))]
    dtype, keeps = state.plan.input_dtype(""), state.plan.policy.keep_inputs_in_fp32
    method = getattr(model, method_name)
    pre_forwards: list[PreForward] = []
    if state.containers.copies_of_root:
        pre_forwards.append(state.containers.take_inputs_of_root)
    if dtype is not None:
        pre_forwards.append(cast_inputs(dtype, state.containers, method, keeps))
    with state.changes.noting([model]):
        state.root_forward.register_method(
            model,
            method_name,
            pre_forwards=pre_forwards,
            groups=[typed_group_hooks(holder) for holder in at_root],
        )


def _refuse_other_mesh(mesh: object) -> None:
    if not (mesh is None or isinstance(mesh, DeviceMesh)):
        what = "Pass one of init_device_mesh, or leave it out."
        raise WrapError(describe("wrap_model(mesh=)", shown(mesh), "a torch.distributed.DeviceMesh", what))


def _refuse_unusable(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise WrapError(describe("model", f"a {type(model).__name__}", "a torch.nn.Module", "Pass the module itself."))
    wrapped = next((fqn for fqn, module in model.named_modules() if isinstance(module, FSDPModule)), None)
    if wrapped is not None:
        raise WrapError(
            f"{wrapped or 'The root'} is sharded already: fully_shard or wrap_model was applied to it. Wrap a model "
            "once. To wrap it in another way, call zeroamp.unwrap_model(model) first; after fully_shard, build it anew."
        )
    meta = [fqn for fqn, parameter in model.named_parameters() if parameter.is_meta]
    real = [fqn for fqn, parameter in model.named_parameters() if not parameter.is_meta]
    if meta and real:
        raise WrapError(
            f"{meta[0]} is on the meta device, but other parameters are not, such as {real[0]}. Either all or none "
            "must be on the meta device. Give new modules values first: module.to_empty(device=...), then "
            "module.reset_parameters()."
        )
    if torch.is_inference_mode_enabled():
        raise WrapError(
            "wrap_model was called inside torch.inference_mode(). Parameters that are made there cannot be updated. "
            "Use torch.no_grad() instead, or neither."
        )

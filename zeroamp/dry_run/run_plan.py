"""`plan_run`: predicts memory, traffic and time of a training run at each ZeRO stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.discovery.experts import experts_implementation
from zeroamp.discovery.extension import needs_run
from zeroamp.dry_run.checks import (
    STAGES,
    check_axes,
    check_counts,
    check_mesh_and_stages,
    check_speeds,
    possible_stages,
)
from zeroamp.dry_run.efficiency import Efficiency, efficiency_of
from zeroamp.dry_run.equal_layers import trace_few_layers
from zeroamp.dry_run.events import Change
from zeroamp.dry_run.gpus import Gpu, find_gpu
from zeroamp.dry_run.inputs import Arguments, InputFactory, arguments_for
from zeroamp.dry_run.memory import memory_timeline
from zeroamp.dry_run.meshes import MeshAdvice, MeshPlan, MeshShape, advise, padding_of, shapes_to_try
from zeroamp.dry_run.network import ITEMSIZE_OF_PARTIALS, Network, two_levels
from zeroamp.dry_run.optimizer_step import OptimizerCosts, OptimizerFactory, optimizer_costs
from zeroamp.dry_run.planned_traffic import plan_traffic
from zeroamp.dry_run.plot import plot_run
from zeroamp.dry_run.render import render_run, run_to_dict, title
from zeroamp.dry_run.step_time import StepTime, step_time
from zeroamp.dry_run.timeline import Timeline
from zeroamp.dry_run.traced_micro_batch import MicroBatch
from zeroamp.hooks.collectives.traffic import Traffic
from zeroamp.meshes.refused_meshes import refuse_combinations
from zeroamp.planning.group_dtypes import group_dtypes
from zeroamp.planning.mesh import Ranks, current_device_type
from zeroamp.planning.mesh_axes import find_axes, ranks_of_axes
from zeroamp.planning.plan import Plan, build_plan
from zeroamp.planning.schedule import live_units, reshards_after_forward
from zeroamp.planning.shard_sizes import local_numel
from zeroamp.policies.auto_wrap import AutoWrapPolicy
from zeroamp.policies.errors import ConfigError, WrapError, ZeroAmpError
from zeroamp.policies.policy import ConfigLike, Policy, Stage, as_policy
from zeroamp.training.loss import LossFunction

MAX_BATCH = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """Predicted memory, traffic and time of a run at one ZeRO stage."""

    plan: Plan
    ranks: Ranks
    memory: Timeline
    """Memory of the first rank, which holds the most, over a step after the first."""
    other_memory: Timeline
    """The same with the opposite choice of activation checkpointing."""
    traffic: Traffic
    """Bytes of the collectives of one step, as `zeroamp.traffic(model)` will count them."""
    time: StepTime
    nccl_bytes: int
    """GPU memory that NCCL takes in addition to `memory`: see `Network.nccl_bytes`."""
    largest_batch: int
    """Samples per micro-batch and rank that fit on the GPU. 0: none fits."""

    @property
    def stage(self) -> Stage:
        """The ZeRO stage."""
        return self.plan.policy.stage

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory on the GPU in bytes, NCCL's included."""
        return self.memory.peak_bytes() + self.nccl_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """The prediction of `plan_run`. `print` shows it as tables."""

    policy: Policy
    world_size: int
    batch: int
    """Samples per micro-batch and rank."""
    seq: int
    checkpointing: bool
    gpu: Gpu
    network: Network
    efficiency: Efficiency
    activations: dict[str, tuple[int, int]]
    """Unit ("" is the root) -> bytes that its forward saves for the backward, without and with checkpointing."""
    stages: tuple[StagePlan, ...]
    refused: dict[Stage, str]
    """Stage that the config's other keys or the mesh do not allow -> the reason."""
    meshes: MeshAdvice | None = None
    """The meshes that were compared at the policy's stage. None on one node, and at stage 0."""
    has_experts: bool = False
    """Whether the model has transformers' MoE experts. The plan assumes equally many tokens for all experts of a layer.
    """

    def __str__(self) -> str:
        """Return tables of the stages, of the peaks by kind, of the traffic, and of units and groups."""
        return render_run(self)

    def __repr__(self) -> str:
        """Return the model's size, the run and the GPU in one line."""
        return f"RunPlan({title(self).removeprefix('zeroamp: ')})"

    def _repr_html_(self) -> str:
        """Return the tables that `print` shows, for a notebook."""
        return render_run(self, "html")

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, in bytes and seconds. Its keys are stable; new ones may be added."""
        return run_to_dict(self)

    def plot(self, path: Path | str) -> None:
        """Write a plot of the memory over a step, one panel per stage. The suffix of `path` decides the format.

        Raises:
            ConfigError: matplotlib is not installed or cannot write this format, or the file cannot be written.
        """
        plot_run(self, Path(path))

    def fits(self, stage: StagePlan) -> bool:
        """Return whether a stage's peak, NCCL's memory included, is at most the GPU's memory."""
        return stage.peak_bytes <= self.gpu.memory_bytes


def plan_run(
    model: nn.Module,
    policy: Policy | ConfigLike,
    *,
    world_size: int,
    mesh: tuple[int, int] | DeviceMesh | None = None,
    batch: int | None = None,
    seq: int = 2048,
    stages: Sequence[Stage] = STAGES,
    checkpointing: bool = False,
    gpu: str | Gpu = "h100",
    gpus_per_node: int = 8,
    intra_gb_per_s: float | None = None,
    inter_gb_per_s: float | None = None,
    efficiency: Efficiency | None = None,
    inputs: InputFactory | None = None,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory | None = None,
    auto_wrap_policy: AutoWrapPolicy = None,
) -> RunPlan:
    """Predict memory, communicated bytes and time of one optimizer step, without weights, GPUs or ranks.

    Memory is that of the first rank, in a step after the first one. Parameters, gradients and optimizer state are
    exact. The rest is what a traced forward and backward allocate, and what FSDP2 adds to them. `docs/plan.md` has the
    formulas and what is not counted.

    Args:
        model: a plain model, on the meta device or any other. It is not changed.
        policy: see `wrap_model`. Its stage is compared with the others.
        world_size: ranks of the run.
        mesh: (replicas, shards) of stages 1 to 3. None: the mesh that `wrap_model` makes. For a model that is
            distributed over a tensor or expert axis, the named mesh of all ranks.
        batch: samples per micro-batch and rank. None: the config's `train_micro_batch_size_per_gpu`, else 1.
        seq: tokens per sample. `inputs` may give it another meaning.
        stages: the ZeRO stages to compare.
        checkpointing: whether each unit recomputes its forward in the backward.
        gpu: a name in `zeroamp.GPUS`, or a `zeroamp.Gpu` with your own figures.
        gpus_per_node: GPUs joined by the faster links.
        intra_gb_per_s: 10^9 bytes per second from a GPU into its node, one direction. None: the GPU's usual link.
        inter_gb_per_s: the same to other nodes, per GPU.
        efficiency: the fractions of the peak rates that are reached. None: those measured on this GPU, else assumed.
        inputs: (batch, seq) -> the forward's arguments; called under `torch.device("meta")`. None: a transformers
            model's token ids and labels.
        loss_fn: the model's output -> a scalar loss. None: its `.loss`, or the output itself.
        optimizer: parameters -> their optimizer. None: the config's optimizer, else `torch.optim.AdamW`.
        auto_wrap_policy: which modules are units, as for `wrap_model`.

    Raises:
        ConfigError: config, mesh, GPU, inputs or a number are wrong, or the model's control flow depends on values.
        WrapError: the model cannot be wrapped.

    Examples:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
        >>> policy = zeroamp.policy_from_config({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}})
        >>> plan = zeroamp.plan_run(
        ...     model, policy, world_size=8, inputs=lambda batch, seq: torch.empty(batch, seq, 64), loss_fn=torch.sum
        ... )
        >>> [stage.ranks.num_shards for stage in plan.stages]
        [1, 8, 8, 8]
        >>> plan.fits(plan.stages[3])
        True
    """
    policy = as_policy(policy)
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    check_counts(world_size=world_size, batch=batch, seq=seq, gpus_per_node=gpus_per_node)
    axes = find_axes(model, mesh) if isinstance(mesh, DeviceMesh) else None
    shape = check_axes(axes, world_size) if axes is not None else cast("tuple[int, int] | None", mesh)
    check_mesh_and_stages(shape, stages)
    num_tensor = 1 if axes is None else axes.num_tensor
    efficiency = efficiency or efficiency_of(gpu)
    check_speeds(gpu, efficiency, intra_gb_per_s=intra_gb_per_s, inter_gb_per_s=inter_gb_per_s)
    batch = batch or policy.train_micro_batch_size_per_gpu or 1
    intra, inter = intra_gb_per_s or gpu.intra_gb_per_s, inter_gb_per_s or gpu.inter_gb_per_s
    network = Network(
        gpus_per_node=max(1, gpus_per_node // num_tensor),  # the ranks of a tensor axis share a node
        intra_gb_per_s=intra,
        inter_gb_per_s=inter,
        efficiency=efficiency.network,
        ranks_per_node=two_levels(policy, gpus_per_node),
        partial_itemsize=ITEMSIZE_OF_PARTIALS[policy.partials_between_nodes],
    )
    planner = _Planner(
        model, seq, current_device_type(), inputs, loss_fn, optimizer, batch, checkpointing, gpu, network, efficiency
    )
    possible, refused = possible_stages(policy, stages, world_size // num_tensor, shape)
    planned: list[StagePlan] = []
    for of_stage, ranks in possible:
        plan = planner.plan(of_stage, auto_wrap_policy)
        if axes is not None:
            try:
                refuse_combinations(model, plan, axes, materialize=False)
            except WrapError as error:
                if of_stage.stage in (policy.stage, possible[-1][0].stage):
                    raise
                refused[of_stage.stage] = str(error)
                continue
            more = ranks_of_axes(axes)
            ranks = replace(ranks, num_tensor=more.num_tensor, num_expert=more.num_expert)
        planned.append(planner.stage(plan, ranks))
    shown = next((stage for stage in planned if stage.stage == policy.stage), planned[0])
    return RunPlan(
        policy=policy,
        world_size=world_size,
        batch=batch,
        seq=seq,
        checkpointing=checkpointing,
        gpu=gpu,
        network=network,
        efficiency=efficiency,
        activations=planner.activations(planned[0].plan, batch),
        stages=tuple(planned),
        refused=refused,
        meshes=planner.meshes(shown.plan, world_size, auto_wrap_policy) if axes is None else None,
        has_experts=any(experts_implementation(module) is not None for module in model.modules()),
    )


@dataclass(frozen=True, slots=True)
class _Planner:
    """Plans the stages of one model. It traces each micro-batch once, since traces do not depend on the ranks."""

    model: nn.Module
    seq: int
    device_type: str
    inputs: InputFactory | None
    loss_fn: LossFunction | None
    optimizer: OptimizerFactory | None
    batch: int
    checkpointing: bool
    gpu: Gpu
    network: Network
    efficiency: Efficiency
    traced: dict[tuple[object, ...], MicroBatch] = field(default_factory=dict)
    costs: dict[int | None, OptimizerCosts] = field(default_factory=dict)
    """Number of shards -> costs of the optimizer. They do not depend on the stage."""

    def arguments(self, batch: int) -> Arguments:
        """Return (args, kwargs) of the forward for `batch` samples."""
        return arguments_for(self.model, batch, self.seq, self.inputs)

    def plan(self, policy: Policy, auto_wrap_policy: AutoWrapPolicy) -> Plan:
        """Build the plan of one stage."""
        args, kwargs = self.arguments(1) if needs_run(policy) else ((), {})
        return build_plan(self.model, policy, auto_wrap_policy, kwargs or args or None, self.device_type)

    def stage(self, plan: Plan, ranks: Ranks) -> StagePlan:
        """Predict memory, traffic and time of one stage."""
        key = ranks.shards(plan.policy)
        if key not in self.costs:
            # On accelerators torch updates many tensors with one kernel (foreach), which needs copies.
            self.costs[key] = optimizer_costs(plan, ranks, self.optimizer, foreach=True)
        costs = self.costs[key]

        def memory(batch: int, checkpointing: bool) -> Timeline:
            return memory_timeline(plan, ranks, self.micro_batch(plan, batch, checkpointing), costs)

        nccl_bytes, checkpointing = self.nccl_bytes(plan, ranks), self.checkpointing
        return StagePlan(
            plan=plan,
            ranks=ranks,
            memory=memory(self.batch, checkpointing),
            other_memory=memory(self.batch, not checkpointing),
            traffic=plan_traffic(plan, ranks),
            time=self.time(plan, ranks, costs),
            nccl_bytes=nccl_bytes,
            largest_batch=largest_batch(
                lambda batch: memory(batch, checkpointing).peak_bytes() + nccl_bytes, self.gpu.memory_bytes
            ),
        )

    def time(self, plan: Plan, ranks: Ranks, costs: OptimizerCosts) -> StepTime:
        """Return the time of one optimizer step."""
        events = self.micro_batch(plan, self.batch, self.checkpointing).events
        given: dict[str, Any] = {"gpu": self.gpu, "network": self.network, "efficiency": self.efficiency}
        return step_time(plan, ranks, events, costs.moved_bytes, **given)

    def nccl_bytes(self, plan: Plan, ranks: Ranks) -> int:
        """Return the GPU memory that NCCL takes with these ranks, in bytes."""
        live, has_partitions = live_units(plan), plan.policy.hpz_partition_size > 1
        resharded = [group for group in plan.groups if reshards_after_forward(group.kind, group.unit, plan, live)]
        return self.network.nccl_bytes(
            num_shards=ranks.shards(plan.policy) or 1,
            num_replicas=ranks.num_replicas or 1,
            num_partitions=len(resharded) if has_partitions else 0,
            all_to_all=any(
                group_dtypes(group.key, plan.policy, ranks).reduction == "all_to_all" for group in plan.groups
            ),
            separate=bool(plan.policy.separate_reduce_scatter_group),
        )

    def meshes(self, plan: Plan, world_size: int, auto_wrap_policy: AutoWrapPolicy) -> MeshAdvice | None:
        """Compare the meshes that `world_size` ranks can have, at the stage of `plan`, and choose the best."""
        policy, costs = plan.policy, next(iter(self.costs.items()))
        if policy.stage == 0:
            return None
        plain = plan if policy.hpz_partition_size == 1 else self._with_partition(policy, 1, auto_wrap_policy)

        def plan_mesh(shape: MeshShape) -> MeshPlan:
            of = plain if shape.partition == 1 else self._with_partition(policy, shape.partition, auto_wrap_policy)
            # Exact for element-wise optimizers, except step counters. Tracing a step per mesh would take seconds.
            scaled = costs[1].scaled(local_elements(of, shape.num_shards) / local_elements(of, costs[0] or 1))
            planner = self if shape.ranks_per_node is None else self._in_levels(shape.ranks_per_node)
            memory = memory_timeline(of, shape.ranks, self.micro_batch(of, self.batch, self.checkpointing), scaled)
            peak_bytes = memory.peak_bytes() + planner.nccl_bytes(of, shape.ranks)
            return MeshPlan(
                shape=shape,
                peak_bytes=peak_bytes,
                fits=peak_bytes <= self.gpu.memory_bytes,
                time=planner.time(of, shape.ranks, scaled),
                padding=padding_of(of, shape.num_shards),
            )

        shapes = shapes_to_try(
            world_size,
            self.network.gpus_per_node,
            with_partition=policy.stage == 3 and policy.param_gather_dtype is None,
            with_levels=policy.reduce_accumulate_dtype == "fp32" and self.network.ranks_per_node == 1,
        )
        return advise(list(shapes), plan_mesh)

    def _in_levels(self, ranks_per_node: int) -> "_Planner":
        """Return the same planner for collectives in two levels."""
        return replace(self, network=replace(self.network, ranks_per_node=ranks_per_node))

    def _with_partition(self, policy: Policy, partition: int, auto_wrap_policy: AutoWrapPolicy) -> Plan:
        return self.plan(policy.replace(zero_hpz_partition_size=partition), auto_wrap_policy)

    def micro_batch(self, plan: Plan, batch: int, checkpointing: bool) -> MicroBatch:
        """Return the trace of a micro-batch of `batch` samples. Stages with the same units and dtypes share it.

        Raises:
            ConfigError: the model cannot run on fake tensors, or it returns no loss.
        """
        dtypes: tuple[tuple[str, torch.dtype], ...] = tuple((p.fqn, p.group_key.param) for p in plan.params)
        key = (frozenset(dtypes), plan.units, batch, checkpointing)
        if key not in self.traced:
            arguments = self.arguments(batch)
            options: dict[str, Any] = {"checkpointing": checkpointing, "loss_fn": self.loss_fn}
            try:
                self.traced[key] = trace_few_layers(
                    self.model, plan, arguments, device_type=self.device_type, **options
                )
            except ZeroAmpError:
                raise
            # A forward that needs the value of a fake tensor can raise any class of error.
            except Exception as error:
                message = (str(error).splitlines() or [""])[0]
                raise ConfigError(
                    f"{type(self.model).__name__} cannot be planned: on fake tensors its forward or backward raises "
                    f"{type(error).__name__}: {message}. Control flow and shapes must not depend on values. Check the "
                    "inputs. If the model routes tokens by value, plan a copy of it that routes by a fixed rule."
                ) from error
        return self.traced[key]

    def activations(self, plan: Plan, batch: int) -> dict[str, tuple[int, int]]:
        """Return unit -> bytes that its forward saves for the backward, without and with checkpointing."""
        by_unit = {unit: [0, 0] for unit in ("", *plan.run.forward_order()[1:])}
        for checkpointing in (False, True):
            for event in self.micro_batch(plan, batch, checkpointing).events:
                if isinstance(event, Change) and event.kind == "activations" and event.num_bytes > 0:
                    by_unit[event.unit][checkpointing] += event.num_bytes
        return {unit: (without, with_it) for unit, (without, with_it) in by_unit.items()}


def local_elements(plan: Plan, num_shards: int) -> int:
    """Return the trainable elements that a rank holds, padding included; at least 1."""
    return max(1, sum(local_numel(param, num_shards) for param in plan.params if param.is_trainable))


def largest_batch(peak_bytes: Callable[[int], int], limit: int) -> int:
    """Return the largest batch whose peak is at most `limit` bytes; 0 if not even 1 fits, at most `MAX_BATCH`.

    A peak is the largest of many sums that are each affine in the batch. So a line through two known peaks is solved
    for the limit and the solution is tried, until a batch fits and the next larger one does not.
    """
    peaks: dict[int, int] = {}
    before, fits, fails = 0, 0, MAX_BATCH + 1
    guess = 1
    while fails - fits > 1:
        peaks[guess] = peak_bytes(guess)
        if peaks[guess] <= limit:
            before, fits = fits, guess
        else:
            fails = guess
        # Interpolate between a batch that fits and one that fails, else extrapolate from the two largest that fit.
        known = [batch for batch in (before, fits, fails) if batch in peaks][-2:]
        solved = fits + 1 if len(known) < 2 else _solve(known[0], known[1], peaks, limit)
        guess = min(max(solved, fits + 1), fails - 1)
    return fits


def _solve(low: int, high: int, peaks: dict[int, int], limit: int) -> int:
    rise = peaks[high] - peaks[low]
    return MAX_BATCH if rise <= 0 else low + (limit - peaks[low]) * (high - low) // rise

"""`plan_run`: predicts memory and traffic of a training run at each ZeRO stage."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.discovery.extension import needs_run
from zeroamp.dry_run.checks import STAGES, check_axes, check_counts, check_mesh_and_stages, possible_stages
from zeroamp.dry_run.equal_layers import trace_few_layers
from zeroamp.dry_run.events import Change
from zeroamp.dry_run.gpu_memory import memory_of, nccl_bytes
from zeroamp.dry_run.inputs import Arguments, InputFactory, arguments_for
from zeroamp.dry_run.memory import memory_timeline
from zeroamp.dry_run.optimizer_step import OptimizerCosts, OptimizerFactory, optimizer_costs
from zeroamp.dry_run.planned_traffic import plan_traffic
from zeroamp.dry_run.remedies import Remedy, find_remedies, largest_batch
from zeroamp.dry_run.render import render_run, run_to_dict, title
from zeroamp.dry_run.timeline import Timeline
from zeroamp.dry_run.traced_micro_batch import MicroBatch
from zeroamp.hooks.collectives.traffic import Traffic
from zeroamp.meshes.refused_meshes import refuse_combinations
from zeroamp.planning.mesh import Ranks, current_device_type
from zeroamp.planning.mesh_axes import find_axes, ranks_of_axes
from zeroamp.planning.plan import Plan, build_plan
from zeroamp.policies.auto_wrap import AutoWrapPolicy
from zeroamp.policies.errors import ConfigError, WrapError, ZeroAmpError
from zeroamp.policies.policy import ConfigLike, Policy, Stage, as_policy
from zeroamp.training.loss import LossFunction


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """Predicted memory and traffic of a run at one ZeRO stage."""

    plan: Plan
    ranks: Ranks
    memory: Timeline
    """Memory of the first rank, which holds the most, over a step after the first."""
    other_memory: Timeline
    """The same with the opposite choice of activation checkpointing."""
    traffic: Traffic
    """Bytes of the collectives of one step, as `zeroamp.traffic(model)` will count them."""
    nccl_bytes: int
    """GPU memory that NCCL takes in addition to `memory`: see `gpu_memory.nccl_bytes`."""
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
    gpu: str | float
    """Name of the GPU, or its memory in 10^9 bytes."""
    gpu_bytes: int
    """Memory of the GPU."""
    activations: dict[str, tuple[int, int]]
    """Unit ("" is the root) -> bytes that its forward saves for the backward, without and with checkpointing."""
    stages: tuple[StagePlan, ...]
    refused: dict[Stage, str]
    """Stage that the config's other keys or the mesh do not allow -> the reason."""
    remedies: tuple[Remedy, ...] | None = None
    """If no stage fits: changes of the run, each with which it would fit. Empty: none of those tried fits."""

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
        """Return a dict for JSON, in bytes. Its keys are stable; new ones may be added."""
        return run_to_dict(self)

    def fits(self, stage: StagePlan) -> bool:
        """Return whether a stage's peak, NCCL's memory included, is at most the GPU's memory."""
        return stage.peak_bytes <= self.gpu_bytes


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
    gpu: str | float = "h100",
    gpus_per_node: int = 8,
    inputs: InputFactory | None = None,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory | None = None,
    auto_wrap_policy: AutoWrapPolicy = None,
) -> RunPlan:
    """Predict memory and communicated bytes of one optimizer step, without weights, GPUs or ranks.

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
        gpu: a name such as "h100" (`zeroamp plan --help` lists them), or the memory of another GPU in 10^9 bytes.
        gpus_per_node: GPUs of a node, on which the memory of NCCL depends.
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
    gpu_bytes = memory_of(gpu)
    check_counts(world_size=world_size, batch=batch, seq=seq, gpus_per_node=gpus_per_node)
    axes = find_axes(model, mesh) if isinstance(mesh, DeviceMesh) else None
    shape = check_axes(axes, world_size) if axes is not None else cast("tuple[int, int] | None", mesh)
    check_mesh_and_stages(shape, stages)
    num_tensor = 1 if axes is None else axes.num_tensor
    batch = batch or policy.train_micro_batch_size_per_gpu or 1
    planner = _Planner(
        model, seq, current_device_type(), inputs, loss_fn, optimizer, batch, checkpointing, gpu_bytes, gpus_per_node
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
    return RunPlan(
        policy=policy,
        world_size=world_size,
        batch=batch,
        seq=seq,
        checkpointing=checkpointing,
        gpu=gpu,
        gpu_bytes=gpu_bytes,
        activations=planner.activations(planned[0].plan, batch),
        stages=tuple(planned),
        refused=refused,
        remedies=None if any(map(planner.fits, planned)) else planner.remedies(planned, world_size, auto_wrap_policy),
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
    gpu_bytes: int
    gpus_per_node: int
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

    def memory(self, plan: Plan, ranks: Ranks, batch: int, checkpointing: bool) -> Timeline:
        """Return the memory of one rank over a step."""
        key = ranks.shards(plan.policy)
        if key not in self.costs:
            # On accelerators torch updates many tensors with one kernel (foreach), which needs copies.
            self.costs[key] = optimizer_costs(plan, ranks, self.optimizer, foreach=True)
        return memory_timeline(plan, ranks, self.micro_batch(plan, batch, checkpointing), self.costs[key])

    def stage(self, plan: Plan, ranks: Ranks) -> StagePlan:
        """Predict memory and traffic of one stage."""
        of_nccl = nccl_bytes(plan, ranks, self.gpus_per_node)

        def peak_bytes(batch: int) -> int:
            return self.memory(plan, ranks, batch, self.checkpointing).peak_bytes() + of_nccl

        return StagePlan(
            plan=plan,
            ranks=ranks,
            memory=self.memory(plan, ranks, self.batch, self.checkpointing),
            other_memory=self.memory(plan, ranks, self.batch, not self.checkpointing),
            traffic=plan_traffic(plan, ranks),
            nccl_bytes=of_nccl,
            largest_batch=largest_batch(peak_bytes, self.gpu_bytes),
        )

    def fits(self, stage: StagePlan) -> bool:
        """Return whether a stage's peak, NCCL's memory included, is at most the GPU's memory."""
        return stage.peak_bytes <= self.gpu_bytes

    def remedies(
        self, stages: Sequence[StagePlan], num_ranks: int, auto_wrap_policy: AutoWrapPolicy
    ) -> tuple[Remedy, ...]:
        """Return changes with which the run fits, at the highest of the planned stages."""
        stage = max(stages, key=lambda stage: stage.stage)
        plans = {stage.plan.policy.offload.to_cpu: stage.plan}
        if False in plans:
            try:
                offloading = stage.plan.policy.replace(offload_optimizer={"device": "cpu"})
                plans[True] = self.plan(offloading, auto_wrap_policy)
            except ConfigError:
                pass  # another key of the config excludes offload

        def measured(remedy: Remedy) -> Remedy:
            plan = plans[remedy.offload]
            ranks = replace(stage.ranks, num_shards=(stage.ranks.num_shards or 1) * remedy.num_ranks // num_ranks)
            memory = self.memory(plan, ranks, remedy.batch, remedy.checkpointing)
            of_nccl = nccl_bytes(plan, ranks, self.gpus_per_node)
            return replace(remedy, peak_bytes=memory.peak_bytes(), nccl_bytes=of_nccl, host_bytes=memory.host_bytes())

        unchanged = Remedy(
            stage=stage.stage,
            num_ranks=num_ranks,
            batch=self.batch,
            checkpointing=self.checkpointing,
            offload=stage.plan.policy.offload.to_cpu,
        )
        return find_remedies(unchanged, stage.largest_batch, measured, self.gpu_bytes, can_offload=True in plans)

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

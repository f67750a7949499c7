"""`plan_run`: what a training run will need and take, stage by stage, before it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from zeroamp.dry_run.checked_numbers import STAGES, check_counts, check_mesh, check_speeds, check_stages
from zeroamp.dry_run.events import ACTIVATIONS, Change
from zeroamp.dry_run.gpus import Gpu, find_gpu
from zeroamp.dry_run.inputs import InputFactory
from zeroamp.dry_run.largest_batch import largest_batch
from zeroamp.dry_run.memory import memory_timeline
from zeroamp.dry_run.network import Network
from zeroamp.dry_run.optimizer_step import OptimizerCosts, OptimizerFactory, optimizer_costs
from zeroamp.dry_run.plot import plot_run
from zeroamp.dry_run.ranks import possible_stages
from zeroamp.dry_run.render import render_run, run_to_dict
from zeroamp.dry_run.roofline import Efficiency, StepTime, step_time
from zeroamp.dry_run.timeline import Timeline
from zeroamp.dry_run.trace import LossFunction
from zeroamp.dry_run.traces import Traces
from zeroamp.hooks.collectives.traffic import Traffic
from zeroamp.planning.mesh import Ranks, current_device_type
from zeroamp.planning.plan import Plan, build_plan
from zeroamp.planning.traffic import plan_traffic
from zeroamp.policies.policy import Policy, Stage
from zeroamp.policies.wrap import AutoWrapPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One ZeRO stage of a run."""

    plan: Plan
    ranks: Ranks
    memory: Timeline
    """Of the first rank, which holds the most, over a step after the first."""
    other_memory: Timeline
    """The same with activation checkpointing where the run has none, and without where it has it."""
    traffic: Traffic
    """What one step moves: what `zeroamp.traffic(model)` will count."""
    time: StepTime
    largest_batch: int
    """Samples per micro-batch and rank that fit on the GPU. 0: not even one."""

    @property
    def stage(self) -> Stage:
        """The ZeRO stage."""
        return self.plan.policy.stage


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """What `plan_run` returns. `print` shows it as text."""

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
    """Unit ("" is the root) -> bytes that its forward leaves for the backward, without and with checkpointing."""
    stages: tuple[StagePlan, ...]
    refused: dict[Stage, str]
    """Stages that the config's other keys or the mesh do not go with, and why."""

    def __str__(self) -> str:
        """Return tables of the stages, of the peaks by kind, of the traffic, and of units and groups."""
        return render_run(self)

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold. Bytes and seconds; its keys stay, new ones may come."""
        return run_to_dict(self)

    def plot(self, path: Path | str) -> None:
        """Write a picture of the memory over a step, one panel per stage; the suffix names the format.

        Raises:
            ConfigError: matplotlib is not installed, the suffix names no format, or the file cannot be written.
        """
        plot_run(self, Path(path))

    def fits(self, stage: StagePlan) -> bool:
        """Whether a stage's peak is at most the GPU's memory."""
        return stage.memory.peak_bytes() <= self.gpu.memory_bytes


def plan_run(
    model: nn.Module,
    policy: Policy,
    *,
    world_size: int,
    mesh: tuple[int, int] | None = None,
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
    """Predict memory, bytes on the wire and time of one optimizer step, without weights, GPUs or ranks.

    Memory is that of one rank, the first, in a step after the first one: exact for parameters, gradients and optimizer
    state, and for the rest what a traced forward and backward allocate, with what FSDP2 adds around them.
    `docs/plan.md` has the formulas and what is not counted.

    Args:
        model: a plain model, on the meta device too. It is left as it was.
        policy: from `policy_from_config`; its stage is one of those that are compared.
        world_size: ranks of the run.
        mesh: (replicas, shards) of stages 1 to 3. None: as `wrap_model` makes it.
        batch: samples per micro-batch and rank. None: the config's `train_micro_batch_size_per_gpu`, else 1.
        seq: tokens per sample; what else it means is up to `inputs`.
        stages: which to compare.
        checkpointing: whether each unit recomputes its forward in the backward.
        gpu: a name in `zeroamp.GPUS`, or figures of your own.
        gpus_per_node: ranks that the faster links join.
        intra_gb_per_s: 10^9 bytes per second from a GPU into its node, one direction. None: the GPU's usual link.
        inter_gb_per_s: the same to other nodes, per GPU.
        efficiency: the parts of the peaks that are reached.
        inputs: function of (batch, seq) that returns what the forward takes; called under `torch.device("meta")`.
            None: a transformers model's token ids and labels.
        loss_fn: makes a scalar of the model's output. Default: its `.loss`, or the output itself.
        optimizer: makes the optimizer of parameters. None: that of the config, else `torch.optim.AdamW`.
        auto_wrap_policy: which modules are units, as for `wrap_model`.

    Raises:
        ConfigError: config, mesh, GPU, inputs or a number are wrong, or the model's control flow depends on values.
        WrapError: the model cannot be wrapped.
    """
    gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
    check_counts(world_size=world_size, batch=batch, seq=seq, gpus_per_node=gpus_per_node)
    check_mesh(mesh)
    check_stages(stages)
    batch = batch or policy.train_micro_batch_size_per_gpu or 1
    efficiency = efficiency or Efficiency()
    check_speeds(gpu, efficiency, intra_gb_per_s=intra_gb_per_s, inter_gb_per_s=inter_gb_per_s)
    network = Network(
        gpus_per_node=gpus_per_node,
        intra_gb_per_s=intra_gb_per_s or gpu.intra_gb_per_s,
        inter_gb_per_s=inter_gb_per_s or gpu.inter_gb_per_s,
        efficiency=efficiency.network,
    )
    device_type = current_device_type()
    traces = Traces(model, seq, device_type=device_type, inputs=inputs, loss_fn=loss_fn)
    planner = _Planner(traces, batch, checkpointing, gpu, network, efficiency, optimizer)
    possible, refused = possible_stages(policy, stages, world_size, mesh)
    planned: list[StagePlan] = []
    for of_stage, ranks in possible:
        example = traces.arguments(1) if policy.lower_precision_safe_modules == "auto" else ((), {})
        plan = build_plan(model, of_stage, auto_wrap_policy, example[1] or example[0] or None, device_type)
        planned.append(planner.stage(plan, ranks))
    return RunPlan(
        policy=policy,
        world_size=world_size,
        batch=batch,
        seq=seq,
        checkpointing=checkpointing,
        gpu=gpu,
        network=network,
        efficiency=efficiency,
        activations=_activations(traces, planned[0].plan, batch),
        stages=tuple(planned),
        refused=refused,
    )


@dataclass(frozen=True, slots=True)
class _Planner:
    """What all stages of a run share."""

    traces: Traces
    batch: int
    checkpointing: bool
    gpu: Gpu
    network: Network
    efficiency: Efficiency
    optimizer: OptimizerFactory | None
    costs: dict[int | None, OptimizerCosts] = field(default_factory=dict)
    """Ranks that shard -> what the optimizer costs: parameters are the same at every stage."""

    def stage(self, plan: Plan, ranks: Ranks) -> StagePlan:
        """Plan one stage."""
        costs = self._costs(plan, ranks)
        trace = self.traces.of(plan, self.batch, checkpointing=self.checkpointing)
        return StagePlan(
            plan=plan,
            ranks=ranks,
            memory=memory_timeline(plan, ranks, trace, costs),
            other_memory=self._memory(plan, ranks, costs, self.batch, not self.checkpointing),
            traffic=plan_traffic(plan, ranks),
            time=step_time(
                *(plan, ranks, trace.events, costs.moved_bytes),
                gpu=self.gpu,
                network=self.network,
                efficiency=self.efficiency,
            ),
            largest_batch=largest_batch(
                lambda batch: self._memory(plan, ranks, costs, batch, self.checkpointing).peak_bytes(),
                self.gpu.memory_bytes,
            ),
        )

    def _costs(self, plan: Plan, ranks: Ranks) -> OptimizerCosts:
        key = ranks.shards(plan.policy)
        if key not in self.costs:
            # torch updates many tensors with one kernel on accelerators, which needs copies; every GPU here is one.
            self.costs[key] = optimizer_costs(plan, ranks, self.optimizer, foreach=True)
        return self.costs[key]

    def _memory(self, plan: Plan, ranks: Ranks, costs: OptimizerCosts, batch: int, checkpointing: bool) -> Timeline:
        return memory_timeline(plan, ranks, self.traces.of(plan, batch, checkpointing=checkpointing), costs)


def _activations(traces: Traces, plan: Plan, batch: int) -> dict[str, tuple[int, int]]:
    kept: list[dict[str, int]] = []
    for checkpointing in (False, True):
        by_unit = dict.fromkeys(("", *plan.run.forward_order()[1:]), 0)
        for event in traces.of(plan, batch, checkpointing=checkpointing).events:
            if isinstance(event, Change) and event.kind == ACTIVATIONS and event.num_bytes > 0:
                by_unit[event.unit] += event.num_bytes
        kept.append(by_unit)
    return {unit: (kept[0][unit], kept[1][unit]) for unit in kept[0]}

"""`plan_run`: predicts memory and traffic of a training run at each ZeRO stage."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zeroamp.discovery.extension import needs_run
from zeroamp.dry_run.gpu_memory import largest_batch, memory_of, usable_bytes
from zeroamp.dry_run.inputs import Arguments, InputFactory, arguments_for
from zeroamp.dry_run.memory import memory_timeline
from zeroamp.dry_run.optimizer_step import OptimizerFactory, PartCosts, optimizer_costs
from zeroamp.dry_run.planned_run import RunPlan, StagePlan
from zeroamp.dry_run.planned_traffic import plan_traffic
from zeroamp.dry_run.timeline import Timeline
from zeroamp.dry_run.traced_micro_batch import MicroBatch, trace_micro_batch
from zeroamp.hooks.tensors import tensors_in
from zeroamp.planning.mesh import Ranks, current_device_type, mesh_shape, refuse_partition
from zeroamp.planning.plan import Plan, build_plan
from zeroamp.policies.accumulation import STAGES
from zeroamp.policies.auto_wrap import AutoWrapPolicy
from zeroamp.policies.errors import ConfigError, WrapError, ZeroAmpError
from zeroamp.policies.numbers import counted, is_integer
from zeroamp.policies.policy import ConfigLike, Policy, Stage, as_policy
from zeroamp.training.loss import LossFunction

logger = logging.getLogger("zeroamp")


def plan_run(
    model: nn.Module,
    policy: Policy | ConfigLike,
    *,
    world_size: int,
    batch: int | None = None,
    seq: int = 2048,
    stages: Sequence[Stage] = STAGES,
    checkpointing: bool = False,
    offload_activations: bool = False,
    gpu: str | float = "h100",
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
        world_size: ranks of the run. Its replicas are `zeroamp.dp_replicate_size`.
        batch: samples per micro-batch and rank. None: the config's `train_micro_batch_size_per_gpu`, else 1.
        seq: tokens per sample. `inputs` may give it another meaning.
        stages: the ZeRO stages to compare.
        checkpointing: whether each unit recomputes its forward in the backward.
        offload_activations: whether forward and loss run under `zeroamp.save_on_cpu`.
        gpu: a name such as "h100" (`zeroamp plan --help` lists them), or the memory of another GPU in 10^9 bytes.
        inputs: (batch, seq) -> the forward's arguments; called under `torch.device("meta")`. None: a transformers
            model's token ids and labels.
        loss_fn: the model's output -> a scalar loss. None: its `.loss`, or the output itself.
        optimizer: parameters -> their optimizer. None: the config's optimizer, else `torch.optim.AdamW`.
        auto_wrap_policy: which modules are units, as for `wrap_model`.

    Raises:
        ConfigError: config, GPU, inputs or a number are wrong, or the model's control flow depends on values.
        WrapError: the model cannot be wrapped.

    Examples:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)).to("meta")
        >>> policy = zeroamp.policy_from_config({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}})
        >>> plan = zeroamp.plan_run(
        ...     model, policy, world_size=8, inputs=lambda batch, seq: torch.empty(batch, seq, 64), loss_fn=torch.sum
        ... )
        >>> [stage.ranks.num_shards for stage in plan.stages]
        [1, 8, 8, 8]
        >>> plan.fits(plan.stages[3])
        True
    """
    policy, gpu_bytes = as_policy(policy), memory_of(gpu)
    batch = (policy.train_micro_batch_size_per_gpu or 1) if batch is None else batch
    _check_arguments(stages, world_size=world_size, batch=batch, seq=seq)
    run = _Run(
        model=model,
        auto_wrap_policy=auto_wrap_policy,
        seq=seq,
        inputs=inputs,
        loss_fn=loss_fn,
        offload_activations=offload_activations,
        optimizer=optimizer,
        limit=usable_bytes(gpu_bytes),
    )
    possible, refused = run.possible_stages(policy, stages, world_size)
    return RunPlan(
        **run.sizes_of_inputs(batch),
        policy=policy,
        world_size=world_size,
        batch=batch,
        seq=seq,
        checkpointing=checkpointing,
        offload_activations=offload_activations,
        gpu=gpu,
        gpu_bytes=gpu_bytes,
        stages=tuple(run.stage(plan, ranks, batch, checkpointing) for plan, ranks in possible),
        refused=refused,
    )


def _check_arguments(stages: Sequence[Stage], **numbers: object) -> None:
    for name, value in numbers.items():
        if not is_integer(value, at_least=1):
            raise ConfigError(f"plan_run({name}=) must be an integer of 1 or more, but is {value!r}.")
    if not stages or set(stages) - set(STAGES):
        raise ConfigError(f"plan_run(stages=) must be one or more of {STAGES}, but is {stages!r}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """What all stages of a run share. Traces of micro-batches are retained: they do not depend on the ranks."""

    model: nn.Module
    auto_wrap_policy: AutoWrapPolicy
    seq: int
    inputs: InputFactory | None
    loss_fn: LossFunction | None
    offload_activations: bool
    optimizer: OptimizerFactory | None
    limit: int
    """Bytes that a step may take on the GPU."""
    device_type: str = field(default_factory=current_device_type)
    traced: dict[tuple[object, ...], MicroBatch] = field(default_factory=dict)
    costs: dict[int | None, list[PartCosts]] = field(default_factory=dict)
    """Number of shards -> costs of the optimizer. They do not depend on the stage."""

    def possible_stages(
        self, policy: Policy, stages: Sequence[Stage], world_size: int
    ) -> tuple[list[tuple[Plan, Ranks]], dict[Stage, str]]:
        """Return the plan and ranks of each stage that the config allows, in order, and why others are refused.

        If the policy's own stage is refused, or all stages are, that is an error.
        """
        possible: list[tuple[Plan, Ranks]] = []
        refused: dict[Stage, str] = {}
        for stage in sorted(set(stages)):
            try:
                of_stage = policy.replace(stage=stage)
                possible.append((self.plan(of_stage), ranks_at(of_stage, world_size)))
            except (ConfigError, WrapError) as error:
                if stage == policy.stage or (stage == max(stages) and not possible):
                    raise
                refused[stage] = str(error)
        return possible, refused

    def arguments(self, batch: int) -> Arguments:
        """Return (args, kwargs) of the forward for `batch` samples."""
        return arguments_for(self.model, batch, self.seq, self.inputs)

    def sizes_of_inputs(self, batch: int) -> dict[str, bool]:
        """Return whether the inputs have a batch and a length: `is_batched` and `has_length` of `RunPlan`."""
        shapes = self.shapes(batch)
        return {
            "is_batched": shapes != self.shapes(batch + 1),
            "has_length": any(self.seq in shape for shape in shapes),
        }

    def shapes(self, batch: int) -> list[torch.Size]:
        """Return the shapes of the tensors of `arguments`."""
        return [tensor.shape for tensor in tensors_in(self.arguments(batch))]

    def plan(self, policy: Policy) -> Plan:
        """Build the plan of one stage."""
        args, kwargs = self.arguments(1) if needs_run(policy) else ((), {})
        return build_plan(self.model, policy, self.auto_wrap_policy, kwargs or args or None, self.device_type)

    def memory(self, plan: Plan, ranks: Ranks, batch: int, checkpointing: bool) -> Timeline:
        """Return the memory of one rank over a step."""
        key = ranks.shards(plan.policy)
        if key not in self.costs:
            # On accelerators torch updates many tensors with one kernel (foreach), which needs copies.
            self.costs[key] = optimizer_costs(plan, ranks, self.optimizer, foreach=True)
        return memory_timeline(plan, ranks, self.micro_batch(plan, batch, checkpointing), self.costs[key])

    def stage(self, plan: Plan, ranks: Ranks, batch: int, checkpointing: bool) -> StagePlan:
        """Predict memory and traffic of one stage."""

        def peak_bytes(batch: int) -> int:
            return self.memory(plan, ranks, batch, checkpointing).peak_bytes()

        return StagePlan(
            plan=plan,
            ranks=ranks,
            memory=self.memory(plan, ranks, batch, checkpointing),
            traffic=plan_traffic(plan, ranks),
            largest_batch=largest_batch(peak_bytes, self.limit),
        )

    def micro_batch(self, plan: Plan, batch: int, checkpointing: bool) -> MicroBatch:
        """Return the trace of a micro-batch of `batch` samples. Stages with the same units and dtypes share it."""
        dtypes: tuple[tuple[str, torch.dtype], ...] = tuple((p.fqn, p.group_key.param) for p in plan.params)
        key = (frozenset(dtypes), plan.units, batch, checkpointing)
        if key not in self.traced:
            samples = counted(batch, "sample")
            logger.info("planning stage %d: tracing a micro-batch of %s", plan.policy.stage, samples)
            try:
                self.traced[key] = trace_micro_batch(
                    self.model,
                    plan,
                    self.arguments(batch),
                    device_type=self.device_type,
                    checkpointing=checkpointing,
                    offload_activations=self.offload_activations,
                    loss_fn=self.loss_fn,
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


def ranks_at(policy: Policy, world_size: int) -> Ranks:
    """Return the shards and replicas that `wrap_model` would make at the policy's stage, or raise its ConfigError."""
    *replicas, num_shards = mesh_shape(policy.stage, world_size, policy.dp_replicate_size)
    if policy.stage == 3:
        refuse_partition(policy, num_shards)
    return Ranks(num_shards=num_shards, num_replicas=replicas[0] if replicas else None)

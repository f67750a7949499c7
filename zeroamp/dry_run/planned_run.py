"""`RunPlan`: what `plan_run` predicts, as values, as tables, and as a dict for JSON and for the page."""

from dataclasses import asdict, dataclass
from typing import Any

from zeroamp.dry_run.gpu_memory import RESERVED_BYTES, usable_bytes
from zeroamp.dry_run.timeline import KINDS, PHASES, Timeline
from zeroamp.hooks.collectives.traffic import Traffic
from zeroamp.ledger.rows import ledger_rows
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.policies.numbers import counted, size_text
from zeroamp.policies.policy import Policy, Stage
from zeroamp.reporting.tables import Row, headed, in_one_unit, paragraph

_NOTE = (
    "Memory: of one rank at its peak, in a step after the first. Traffic: bytes that are communicated, counted as by "
    f"zeroamp.traffic(model). fits: with a reserve of {RESERVED_BYTES / 1e9} GB for NCCL and the driver's context, "
    "which is not part of the peak. Fragmentation is not counted. 1 GiB is 1024³ bytes."
)
_EXPERTS = " Every expert of an MoE layer gets equally many tokens."
BETWEEN = "between steps"
"""The column of the phase "init"."""
_NOTHING_FITS = (
    "Nothing fits. Plan again with activation checkpointing, with zero_optimization.offload_param, with more ranks, "
    "with shorter sequences, with a smaller batch or with a GPU that has more memory."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """Predicted memory and traffic of a run at one ZeRO stage."""

    plan: Plan
    ranks: Ranks
    memory: Timeline
    """Memory of the first rank, which holds the most, over a step after the first."""
    traffic: Traffic
    """Bytes of the collectives of one step, as `zeroamp.traffic(model)` will count them."""
    largest_batch: int
    """Samples per micro-batch and rank that fit on the GPU. 0: none fits."""

    @property
    def stage(self) -> Stage:
        """The ZeRO stage."""
        return self.plan.policy.stage


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """The prediction of `plan_run`. `print` shows it as tables."""

    policy: Policy
    world_size: int
    batch: int
    """Samples per micro-batch and rank."""
    seq: int
    is_batched: bool
    """Whether the inputs change with the batch. If not, there is no largest one."""
    has_length: bool
    """Whether an input has a dimension of `seq`. Images have none."""
    checkpointing: bool
    offload_activations: bool
    gpu: str | float
    """Name of the GPU, or its memory in 10^9 bytes."""
    gpu_bytes: int
    """Memory of the GPU."""
    stages: tuple[StagePlan, ...]
    refused: dict[Stage, str]
    """Stage that the config's other keys do not allow -> the reason."""

    def __str__(self) -> str:
        """Return tables of the stages and of the peaks by kind, with notes."""
        stages = in_one_unit([self._stage_row(stage) for stage in self.stages], (BETWEEN, *PHASES, "peak"))
        peaks = [_kind_row(stage) for stage in self.stages]
        parts = [
            paragraph(self.title()),
            headed("Stages", in_one_unit(stages, ["traffic"])),
            *(paragraph(f"stage {stage}: not possible: {reason}") for stage, reason in self.refused.items()),
            *([] if any(map(self.fits, self.stages)) else [paragraph(_NOTHING_FITS)]),
            headed("Memory of one rank at the peak", in_one_unit(peaks, peaks[0].keys() - {"stage"})),
            paragraph(f"{_NOTE}{_EXPERTS * self._has_experts}"),
        ]
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        """Return the model's size, the run and the GPU in one line."""
        return f"RunPlan({self.title().removeprefix('zeroamp: ')})"

    def title(self) -> str:
        """Return the sentence above the tables: the model, the run and the GPU."""
        plan = self.stages[0].plan
        numel = sum(param.numel for param in plan.params)
        checkpointing = "with" if self.checkpointing else "without"
        on_host = ", activations on the host" * self.offload_activations
        low = f", {text}" if (text := plan.describe_low_share()) else ""
        num_micro = counted(self.policy.gradient_accumulation_steps, "micro-batch", "micro-batches")
        samples = f" of {counted(self.batch, 'sample')}" * self.is_batched
        tokens = f" of {counted(self.seq, 'token')}" * self.has_length
        return (
            f"zeroamp: {numel:,} parameters, mode {self.policy.mode}, {counted(self.world_size, 'rank')}, "
            f"{num_micro}{samples}{tokens} per rank, {checkpointing} activation checkpointing{on_host}, "
            f"{self._gpu_name} ({size_text(self.gpu_bytes)}){low}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, in bytes. Its keys are stable; new ones may be added."""
        return {
            "config": self.policy.to_config(),
            "world_size": self.world_size,
            "batch": self.batch,
            "seq": self.seq,
            "is_batched": self.is_batched,
            "has_length": self.has_length,
            "checkpointing": self.checkpointing,
            "offload_activations": self.offload_activations,
            "gpu": {"name": self._gpu_name, "memory_bytes": self.gpu_bytes, "reserved_bytes": RESERVED_BYTES},
            "low_share": self.stages[0].plan.low_share,
            "stages": [
                {
                    "stage": stage.stage,
                    **asdict(stage.ranks),
                    "memory": {"peak": stage.memory.peak(), **{phase: stage.memory.peak(phase) for phase in PHASES}},
                    "peak_bytes": stage.memory.peak_bytes(),
                    "host_bytes": stage.memory.host_bytes(),
                    "fits": self.fits(stage),
                    "largest_batch": stage.largest_batch if self.is_batched else None,
                    "traffic": ledger_rows(stage.plan, stage.ranks).traffic,
                }
                for stage in self.stages
            ],
            "refused": {str(stage): reason for stage, reason in self.refused.items()},
        }

    def fits(self, stage: StagePlan) -> bool:
        """Return whether a stage's peak and the reserve are at most the GPU's memory."""
        return stage.memory.peak_bytes() <= usable_bytes(self.gpu_bytes)

    @property
    def _has_experts(self) -> bool:
        return any("expert" in param.fqn.lower() for param in self.stages[0].plan.params)

    @property
    def _gpu_name(self) -> str:
        return self.gpu if isinstance(self.gpu, str) else "GPU"

    def _stage_row(self, stage: StagePlan) -> Row:
        return {
            "stage": stage.stage,
            "shards": stage.ranks.num_shards,
            "replicas": stage.ranks.num_replicas or 1,
            **{BETWEEN if phase == "init" else phase: stage.memory.peak_bytes(phase) for phase in PHASES},
            "peak": stage.memory.peak_bytes(),
            "fits": _yes(self.fits(stage)),
            **({"largest batch": stage.largest_batch} if self.is_batched else {}),
            "traffic": sum(stage.traffic.num_bytes.values()),
        }


def _kind_row(stage: StagePlan) -> Row:
    on_host, peak = stage.memory.on_host, stage.memory.peak()
    row: Row = {"stage": stage.stage}
    for kind in KINDS:
        row[f"{kind}{' (host)' * (kind in on_host)}"] = peak[kind]
        if kind == "activations" and stage.memory.host_activations:
            row["activations (host)"] = stage.memory.host_activations
    return row


def _yes(value: bool) -> str:
    return "yes" if value else "no"

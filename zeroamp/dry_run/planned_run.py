"""`RunPlan`: what `plan_run` predicts, as values, as tables, and as a dict for JSON and for the page."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zeroamp.dry_run.gpu_memory import RESERVED_BYTES, usable_bytes
from zeroamp.dry_run.timeline import KINDS, PHASES, Timeline
from zeroamp.hooks.collectives.traffic import Traffic
from zeroamp.ledger.rows import ledger_rows
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.policies.policy import Policy, Stage
from zeroamp.reporting.tables import Row, headed, in_one_unit, paragraph

_NOTE = (
    "Memory: of one rank at its peak, in a step after the first. init: between two steps. Traffic: bytes that are "
    "communicated, counted as by zeroamp.traffic(model). fits: with a reserve of "
    f"{RESERVED_BYTES / 1e9} GB for NCCL and the driver's context, which is not part of the peak. Fragmentation is not "
    "counted. Every expert of an MoE layer gets equally many tokens. 1 GiB is 1024³ bytes."
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
class Remedy:
    """A change with which a run that does not fit would fit, and the memory of one rank with it."""

    stage: Stage
    num_ranks: int
    checkpointing: bool
    """Whether each unit recomputes its forward in the backward."""
    offload: bool
    """Whether shards, gradients and optimizer state are on the CPU (`zero_optimization.offload_param`)."""
    peak_bytes: int
    """Peak on the GPU."""
    host_bytes: int
    """Bytes in the memory of the host, for this rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """The prediction of `plan_run`. `print` shows it as tables."""

    policy: Policy
    world_size: int
    batch: int
    """Samples per micro-batch and rank."""
    seq: int
    checkpointing: bool
    offload_activations: bool
    gpu: str | float
    """Name of the GPU, or its memory in 10^9 bytes."""
    gpu_bytes: int
    """Memory of the GPU."""
    stages: tuple[StagePlan, ...]
    refused: dict[Stage, str]
    """Stage that the config's other keys do not allow -> the reason."""
    remedies: tuple[Remedy, ...] | None = None
    """If no stage fits: changes of the run, each with which it would fit. Empty: none of those tried fits."""

    def __str__(self) -> str:
        """Return tables of the stages, of the peaks by kind, and of what would fit, with notes."""
        stages = in_one_unit([self._stage_row(stage) for stage in self.stages], (*PHASES, "peak"))
        peaks = [_kind_row(stage) for stage in self.stages]
        parts = [
            paragraph(self.title()),
            headed("Stages", in_one_unit(stages, ["traffic"])),
            *(paragraph(f"stage {stage}: not possible: {reason}") for stage, reason in self.refused.items()),
            *([] if self.remedies is None else [_remedies_text(self.remedies)]),
            headed("Memory of one rank at the peak", in_one_unit(peaks, peaks[0].keys() - {"stage"})),
            paragraph(_NOTE),
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
        return (
            f"zeroamp: {numel:,} parameters, mode {self.policy.mode}, {self.world_size} ranks, "
            f"{self.policy.gradient_accumulation_steps} x batch {self.batch} x {self.seq} per rank, {checkpointing} "
            f"activation checkpointing{on_host}, {self._gpu_name} ({self.gpu_bytes / 2**30:.1f} GiB){low}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, in bytes. Its keys are stable; new ones may be added."""
        return {
            "config": self.policy.to_config(),
            "world_size": self.world_size,
            "batch": self.batch,
            "seq": self.seq,
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
                    "largest_batch": stage.largest_batch,
                    "traffic": ledger_rows(stage.plan, stage.ranks).traffic,
                }
                for stage in self.stages
            ],
            "remedies": None if self.remedies is None else [asdict(remedy) for remedy in self.remedies],
            "refused": {str(stage): reason for stage, reason in self.refused.items()},
        }

    def fits(self, stage: StagePlan) -> bool:
        """Return whether a stage's peak and the reserve are at most the GPU's memory."""
        return stage.memory.peak_bytes() <= usable_bytes(self.gpu_bytes)

    @property
    def _gpu_name(self) -> str:
        return self.gpu if isinstance(self.gpu, str) else "GPU"

    def _stage_row(self, stage: StagePlan) -> Row:
        shape = [number for number in (stage.ranks.num_replicas, stage.ranks.num_shards) if number is not None]
        return {
            "stage": stage.stage,
            "mesh": "x".join(map(str, shape)),
            **{phase: stage.memory.peak_bytes(phase) for phase in PHASES},
            "peak": stage.memory.peak_bytes(),
            "fits": _yes(self.fits(stage)),
            "largest batch": stage.largest_batch,
            "traffic": sum(stage.traffic.num_bytes.values()),
        }


def _kind_row(stage: StagePlan) -> Row:
    on_host, peak = stage.memory.on_host, stage.memory.peak()
    return {"stage": stage.stage, **{f"{kind}{' (host)' * (kind in on_host)}": peak[kind] for kind in KINDS}}


def _remedies_text(remedies: Sequence[Remedy]) -> str:
    if not remedies:
        return paragraph(
            "Nothing fits, and neither would with more ranks, activation checkpointing and offload. Use shorter "
            "sequences, a smaller batch or a GPU with more memory."
        )
    rows = [
        {
            "ranks": remedy.num_ranks,
            "activation checkpointing": _yes(remedy.checkpointing),
            "offload to the CPU": _yes(remedy.offload),
            "peak": remedy.peak_bytes,
            "on the host": remedy.host_bytes,
        }
        for remedy in remedies
    ]
    heading = f"Nothing fits. What would, at stage {remedies[0].stage}, per rank"
    return headed(heading, in_one_unit(rows, ("peak", "on the host")))


def _yes(value: bool) -> str:
    return "yes" if value else "no"

"""Formats a `RunPlan` as text and as a dict for JSON and for the page."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zeroamp.dry_run.gpu_memory import RESERVED_BYTES
from zeroamp.dry_run.timeline import KINDS, PHASES
from zeroamp.ledger.rows import ledger_rows
from zeroamp.reporting.tables import Row, Table, document, in_one_unit

if TYPE_CHECKING:
    from zeroamp.dry_run.run_plan import RunPlan, StagePlan

_NOTE = (
    "Memory: of one rank at its peak, in a step after the first. init: between two steps. Traffic: bytes that are "
    "communicated, counted as by zeroamp.traffic(model). fits: with a reserve of "
    f"{RESERVED_BYTES / 1e9} GB for NCCL and the driver's context, which is not part of the peak. Fragmentation is not "
    "counted. Every expert of an MoE layer gets equally many tokens. 1 GiB is 1024³ bytes."
)


def render_run(run: RunPlan) -> str:
    """Return the tables of a plan and its notes as text."""
    parts: list[str | Table] = [
        title(run),
        Table("Stages", _stage_rows(run)),
        *(f"stage {stage}: not possible: {reason}" for stage, reason in run.refused.items()),
        *_remedies(run),
        Table("Memory of one rank at the peak", _kind_rows(run)),
        _NOTE,
    ]
    return document(parts)


def _remedies(run: RunPlan) -> list[str | Table]:
    if run.remedies is None:
        return []
    if not run.remedies:
        return [
            "Nothing fits, and neither would with more ranks, activation checkpointing and offload. Use shorter "
            "sequences, a smaller batch or a GPU with more memory."
        ]
    rows = [
        {
            "ranks": remedy.num_ranks,
            "activation checkpointing": "yes" if remedy.checkpointing else "no",
            "offload to the CPU": "yes" if remedy.offload else "no",
            "peak": remedy.peak_bytes,
            "on the host": remedy.host_bytes,
        }
        for remedy in run.remedies
    ]
    table = in_one_unit(rows, ("peak", "on the host"))
    return [Table(f"Nothing fits. What would, at stage {run.remedies[0].stage}, per rank", table)]


def run_to_dict(run: RunPlan) -> dict[str, Any]:
    """Return a dict for JSON, in bytes."""
    return {
        "config": run.policy.to_config(),
        "world_size": run.world_size,
        "batch": run.batch,
        "seq": run.seq,
        "checkpointing": run.checkpointing,
        "gpu": {"name": _name(run), "memory_bytes": run.gpu_bytes, "reserved_bytes": RESERVED_BYTES},
        "low_share": run.stages[0].plan.low_share,
        "stages": [_stage_dict(run, stage) for stage in run.stages],
        "remedies": None if run.remedies is None else [asdict(remedy) for remedy in run.remedies],
        "refused": {str(stage): reason for stage, reason in run.refused.items()},
    }


def _stage_dict(run: RunPlan, stage: StagePlan) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        **asdict(stage.ranks),
        "memory": {"peak": stage.memory.peak(), **{phase: stage.memory.peak(phase) for phase in PHASES}},
        "peak_bytes": stage.memory.peak_bytes(),
        "host_bytes": stage.memory.host_bytes(),
        "fits": run.fits(stage),
        "largest_batch": stage.largest_batch,
        "traffic": ledger_rows(stage.plan, stage.ranks).traffic,
    }


def _name(run: RunPlan) -> str:
    return run.gpu if isinstance(run.gpu, str) else "GPU"


def title(run: RunPlan) -> str:
    """Return the sentence above the tables: the model, the run and the GPU."""
    plan = run.stages[0].plan
    numel = sum(param.numel for param in plan.params)
    checkpointing = "with" if run.checkpointing else "without"
    low = f", {text}" if (text := plan.describe_low_share()) else ""
    return (
        f"zeroamp: {numel:,} parameters, mode {run.policy.mode}, {run.world_size} ranks, "
        f"{run.policy.gradient_accumulation_steps} x batch {run.batch} x {run.seq} per rank, {checkpointing} "
        f"activation checkpointing, {_name(run)} ({run.gpu_bytes / 2**30:.1f} GiB){low}"
    )


def _stage_rows(run: RunPlan) -> list[Row]:
    rows = []
    for stage in run.stages:
        shape = [number for number in (stage.ranks.num_replicas, stage.ranks.num_shards) if number is not None]
        rows.append(
            {
                "stage": stage.stage,
                "mesh": "x".join(map(str, shape)),
                **{str(phase): stage.memory.peak_bytes(phase) for phase in PHASES},
                "peak": stage.memory.peak_bytes(),
                "fits": "yes" if run.fits(stage) else "no",
                "largest batch": stage.largest_batch,
                "traffic": sum(stage.traffic.num_bytes.values()),
            }
        )
    return in_one_unit(in_one_unit(rows, (*PHASES, "peak")), ("traffic",))


def _kind_rows(run: RunPlan) -> list[Row]:
    rows = []
    for stage in run.stages:
        peak = stage.memory.peak()
        place = {kind: " (host)" if kind in stage.memory.on_host else "" for kind in KINDS}
        rows.append({"stage": stage.stage, **{f"{kind}{place[kind]}": peak[kind] for kind in KINDS}})
    return in_one_unit(rows, [key for key in rows[0] if key != "stage"])

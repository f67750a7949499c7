"""Formats a `RunPlan` as text and as a dict for JSON and for the page."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zeroamp.dry_run.timeline import KINDS, PHASES, Timeline
from zeroamp.ledger.rows import SHARD_DIMS, ledger_rows
from zeroamp.policies.dtypes import short_name
from zeroamp.reporting.tables import Row, Table, TableStyle, document, fold, in_one_unit

if TYPE_CHECKING:
    from zeroamp.dry_run.run_plan import RunPlan, StagePlan

_NOTE = (
    "Memory: of one rank at its peak, in a step after the first. init: between two steps. Traffic: bytes that are "
    "communicated, counted as by zeroamp.traffic(model). NCCL: an estimate of its memory and the driver's context, "
    "allocated in the first step and not part of the peak. Fragmentation is not counted. 1 GiB is 1024³ bytes."
)


def render_run(run: RunPlan, style: TableStyle = "simple") -> str:
    """Return the tables of a plan and its notes as text, Markdown or HTML."""
    shown = next((stage for stage in run.stages if stage.stage == run.policy.stage), run.stages[0])
    parts: list[str | Table] = [
        title(run),
        Table("Stages", _stage_rows(run)),
        *(f"stage {stage}: not possible: {reason}" for stage, reason in run.refused.items()),
        *_remedies(run),
        Table("Memory of one rank at the peak", _kind_rows(run)),
        Table("Communicated per step", _traffic_rows(run)),
        Table(f"Units and groups at stage {shown.stage}, on one rank", fold(_group_rows(run, shown))),
        _NOTE,
    ]
    return document(parts, style)


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
            "batch": remedy.batch,
            "activation checkpointing": "yes" if remedy.checkpointing else "no",
            "offload to the CPU": "yes" if remedy.offload else "no",
            "peak with NCCL": remedy.peak_bytes + remedy.nccl_bytes,
            "on the host": remedy.host_bytes,
        }
        for remedy in run.remedies
    ]
    table = in_one_unit(rows, ("peak with NCCL", "on the host"))
    return [Table(f"Nothing fits. What would, at stage {run.remedies[0].stage}, per rank", table)]


def run_to_dict(run: RunPlan) -> dict[str, Any]:
    """Return a dict for JSON, in bytes."""
    return {
        "config": run.policy.to_config(),
        "world_size": run.world_size,
        "batch": run.batch,
        "seq": run.seq,
        "checkpointing": run.checkpointing,
        "gpu": {"name": _name(run), "memory_bytes": run.gpu_bytes},
        "activation_bytes": {
            unit or "root": {"kept": kept, "checkpointed": less} for unit, (kept, less) in run.activations.items()
        },
        "low_share": run.stages[0].plan.low_share,
        "stages": [_stage_dict(run, stage) for stage in run.stages],
        "remedies": None if run.remedies is None else [asdict(remedy) for remedy in run.remedies],
        "refused": {str(stage): reason for stage, reason in run.refused.items()},
    }


def _stage_dict(run: RunPlan, stage: StagePlan) -> dict[str, Any]:
    rows = ledger_rows(stage.plan, stage.ranks)
    return {
        "stage": stage.stage,
        "num_shards": stage.ranks.num_shards,
        "num_replicas": stage.ranks.num_replicas,
        "num_tensor": stage.ranks.num_tensor,
        "num_expert": stage.ranks.num_expert,
        "memory": {"peak": _peak(stage.memory), **{phase: _peak(stage.memory, phase) for phase in PHASES}},
        "peak_bytes": stage.memory.peak_bytes(),
        "nccl_bytes": stage.nccl_bytes,
        "peak_bytes_with_other_checkpointing": stage.other_memory.peak_bytes(),
        "host_bytes": stage.memory.host_bytes(),
        "fits": run.fits(stage),
        "largest_batch": stage.largest_batch,
        "traffic": rows.traffic,
        "groups": rows.groups,
    }


def _peak(memory: Timeline, phase: Any = None) -> dict[str, int]:
    return {str(kind): num_bytes for kind, num_bytes in memory.peak(phase).items()}


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
    other = f"{'without' if run.checkpointing else 'with'} checkpointing"
    rows = []
    for stage in run.stages:
        shape = [number for number in (stage.ranks.num_replicas, stage.ranks.num_shards) if number is not None]
        rows.append(
            {
                "stage": stage.stage,
                "mesh": "x".join(map(str, shape)),
                **{str(phase): stage.memory.peak_bytes(phase) for phase in PHASES},
                "peak": stage.memory.peak_bytes(),
                "NCCL": stage.nccl_bytes,
                other: stage.other_memory.peak_bytes(),
                "fits": "yes" if run.fits(stage) else "no",
                "largest batch": stage.largest_batch,
                "traffic": sum(stage.traffic.num_bytes.values()),
            }
        )
    return in_one_unit(in_one_unit(in_one_unit(rows, (*PHASES, "peak", other)), ("NCCL",)), ("traffic",))


def _kind_rows(run: RunPlan) -> list[Row]:
    rows = []
    for stage in run.stages:
        peak = stage.memory.peak()
        place = {kind: " (host)" if kind in stage.memory.on_host else "" for kind in KINDS}
        rows.append({"stage": stage.stage, **{f"{kind}{place[kind]}": peak[kind] for kind in KINDS}})
    return in_one_unit(rows, [key for key in rows[0] if key != "stage"])


def _traffic_rows(run: RunPlan) -> list[Row]:
    totals = [stage.traffic.by_dtype() for stage in run.stages]
    keys = sorted({key for total in totals for key in total}, key=str)
    rows = [
        {
            "collective": collective,
            "dtype": short_name(dtype),
            **{
                f"stage {stage.stage}": total.get((collective, dtype), (0, 0))[1]
                for stage, total in zip(run.stages, totals, strict=True)
            },
        }
        for collective, dtype in keys
    ]
    return in_one_unit(rows, [f"stage {stage.stage}" for stage in run.stages])


def _group_rows(run: RunPlan, stage: StagePlan) -> list[Row]:
    rows = []
    ledger = ledger_rows(stage.plan, stage.ranks)
    for row, group in zip(ledger.groups, stage.plan.all_groups, strict=True):
        kept, less = run.activations.get(group.unit, (0, 0)) if group.kind == "unit" else (None, None)
        rows.append(
            {
                "group": row["group"],
                "elements": row["elements"],
                "param dtype": row["param"],
                "communication dtype": row["communication"],
                **({SHARD_DIMS: ", ".join(map(str, row[SHARD_DIMS]))} if ledger.has_other_dims else {}),
                "shards": row["stored_bytes_per_rank"],
                "unsharded": row["unsharded_bytes_per_rank"],
                "gradients": row["gradient_bytes_per_rank"],
                "activations": kept,
                "checkpointed": less,
            }
        )
    return in_one_unit(rows, ("shards", "unsharded", "gradients", "activations", "checkpointed"))

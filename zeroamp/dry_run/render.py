"""Formats a `RunPlan` as text and as a dict for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zeroamp.dry_run.timeline import KINDS, LABELS, PHASES, Timeline
from zeroamp.ledger.rows import SHARD_DIMS, ledger_rows
from zeroamp.policies.dtypes import short_name
from zeroamp.reporting.tables import Row, Table, TableStyle, document, fold, gb, gib

if TYPE_CHECKING:
    from zeroamp.dry_run.meshes import MeshAdvice, MeshPlan
    from zeroamp.dry_run.run_plan import RunPlan, StagePlan
    from zeroamp.dry_run.step_time import StepTime

_NOTE = (
    "GiB: memory of one rank at its peak, in a step after the first. GB: bytes communicated, counted as by "
    "zeroamp.traffic(model). NCCL: an estimate of its memory and the driver's context, allocated in wrap_model and not "
    "part of the peak. Fragmentation is not counted. Times assume {compute:.0%} of peak FLOP/s, {memory:.0%} of memory "
    "bandwidth and {network:.0%} of the links, and the latencies by which NCCL chooses its algorithms. init GiB: "
    "between two steps. network s: all collectives; latency s: its part that is latency; exposed s: its part that no "
    "op hides. sums s: the ranks' own sums after all-to-alls."
)
_ROUTING_NOTE = "Balanced routing is assumed: every expert of a layer gets equally many tokens."
_ORIGIN = "Parts of the peaks: {origin}."


def render_run(run: RunPlan, style: TableStyle = "simple") -> str:
    """Return the tables of a plan and its notes as text, Markdown or HTML."""
    shown = next((stage for stage in run.stages if stage.stage == run.policy.stage), run.stages[0])
    note = f"{_NOTE} {_ORIGIN}".format(**asdict(run.efficiency)) + (f" {_ROUTING_NOTE}" if run.has_experts else "")
    parts: list[str | Table] = [
        title(run),
        Table("Stages", [_stage_row(run, stage) for stage in run.stages]),
        *([] if run.meshes is None else [_meshes(run.meshes, shown)]),
        *(f"stage {stage}: not possible: {reason}" for stage, reason in run.refused.items()),
        Table("Memory of one rank at the peak, GiB", _kind_rows(run)),
        Table("Communicated per step, GB", _traffic_rows(run)),
        Table(f"Units and groups at stage {shown.stage}, GiB on one rank", fold(_group_rows(run, shown))),
        note,
    ]
    return document(parts, style)


def _meshes(advice: MeshAdvice, shown: StagePlan) -> Table:
    rows = [
        {
            "mesh": str(mesh.shape),
            "peak GiB": gib(mesh.peak_bytes),
            "fits": "yes" if mesh.fits else "no",
            "step s": mesh.time.total,
            "network s": mesh.time.communication,
            "latency s": mesh.time.latency,
            "exposed s": mesh.time.exposed,
            "padding": f"{mesh.padding:.1%}",
        }
        for mesh in advice.tried
    ]
    heading = f"Meshes (replicas x shards) at stage {shown.stage}; peaks with NCCL"
    return Table(heading, rows, f"Best mesh: {advice.best.shape}: {advice.reason}.")


def run_to_dict(run: RunPlan) -> dict[str, Any]:
    """Return a dict for JSON, in bytes and seconds."""
    return {
        "config": run.policy.to_config(),
        "world_size": run.world_size,
        "batch": run.batch,
        "seq": run.seq,
        "checkpointing": run.checkpointing,
        "gpu": {"name": run.gpu.name, "memory_bytes": run.gpu.memory_bytes, "source": run.gpu.source},
        "network": {key: value for key, value in asdict(run.network).items() if key != "efficiency"},
        "efficiency": asdict(run.efficiency),
        "activation_bytes": {
            unit or "root": {"kept": kept, "checkpointed": less} for unit, (kept, less) in run.activations.items()
        },
        "routing": "balanced" if run.has_experts else None,
        "low_share": run.stages[0].plan.low_share,
        "stages": [_stage_dict(run, stage) for stage in run.stages],
        "meshes": None if run.meshes is None else _meshes_dict(run.meshes),
        "refused": {str(stage): reason for stage, reason in run.refused.items()},
    }


def _meshes_dict(advice: MeshAdvice) -> dict[str, Any]:
    return {
        "best": _mesh_dict(advice.best),
        "reason": advice.reason,
        "tried": [_mesh_dict(mesh) for mesh in advice.tried],
    }


def _mesh_dict(mesh: MeshPlan) -> dict[str, Any]:
    return {
        **asdict(mesh.shape),
        "peak_bytes": mesh.peak_bytes,
        "fits": mesh.fits,
        "seconds": _seconds_dict(mesh.time),
        "padding": mesh.padding,
    }


def _seconds_dict(time: StepTime) -> dict[str, float]:
    return {
        "total": time.total,
        "compute": time.compute,
        "optimizer": time.optimizer,
        "communication": time.communication,
        "latency": time.latency,
        "sums": time.sums,
        "exposed_communication": time.exposed,
    }


def _stage_dict(run: RunPlan, stage: StagePlan) -> dict[str, Any]:
    rows = ledger_rows(stage.plan, stage.ranks)
    time = stage.time
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
        "host_bytes": _host_bytes(stage.memory),
        "fits": run.fits(stage),
        "largest_batch": stage.largest_batch,
        "seconds": _seconds_dict(time),
        "flops": time.flops,
        "traffic": rows.traffic,
        "groups": rows.groups,
    }


def title(run: RunPlan) -> str:
    """Return the sentence above the tables: the model, the run and the GPU."""
    plan = run.stages[0].plan
    numel = sum(param.numel for param in plan.params)
    checkpointing = "with" if run.checkpointing else "without"
    low = f", {text}" if (text := plan.describe_low_share()) else ""
    return (
        f"zeroamp: {numel:,} parameters, mode {run.policy.mode}, {run.world_size} ranks, "
        f"{run.policy.gradient_accumulation_steps} x batch {run.batch} x {run.seq} per rank, {checkpointing} "
        f"activation checkpointing, {run.gpu.name} ({run.gpu.memory_bytes / 2**30:.1f} GiB){low}"
    )


def _stage_row(run: RunPlan, stage: StagePlan) -> Row:
    memory, time = stage.memory, stage.time
    shape = [number for number in (stage.ranks.num_replicas, stage.ranks.num_shards) if number is not None]
    other = "without" if run.checkpointing else "with"
    return {
        "stage": stage.stage,
        "mesh": "x".join(map(str, shape)),
        **{f"{phase} GiB": gib(memory.peak_bytes(phase)) for phase in PHASES},
        "peak GiB": gib(memory.peak_bytes()),
        "NCCL GiB": gib(stage.nccl_bytes),
        f"GiB {other} checkpointing": gib(stage.other_memory.peak_bytes()),
        "fits": "yes" if run.fits(stage) else "no",
        "largest batch": stage.largest_batch,
        "GB per step": gb(sum(stage.traffic.num_bytes.values())),
        "step s": time.total,
        "compute s": time.compute,
        "network s": time.communication,
        "latency s": time.latency,
        "sums s": time.sums,
        "exposed s": time.exposed,
        "TFLOP/s per GPU": time.flops / time.total / 1e12,
    }


def _kind_rows(run: RunPlan) -> list[Row]:
    rows = []
    for stage in run.stages:
        peak = stage.memory.peak()
        place = {kind: " (host)" if kind in stage.memory.on_host else "" for kind in KINDS}
        rows.append({"stage": stage.stage, **{f"{LABELS[kind]}{place[kind]}": gib(peak[kind]) for kind in KINDS}})
    return rows


def _traffic_rows(run: RunPlan) -> list[Row]:
    totals = [stage.traffic.by_dtype() for stage in run.stages]
    keys = sorted({key for total in totals for key in total}, key=str)
    return [
        {
            "collective": collective,
            "dtype": short_name(dtype),
            **{
                f"stage {stage.stage}": gb(total.get((collective, dtype), (0, 0))[1])
                for stage, total in zip(run.stages, totals, strict=True)
            },
        }
        for collective, dtype in keys
    ]


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
                "shards": gib(row["stored_bytes_per_rank"]),
                "unsharded": gib(row["unsharded_bytes_per_rank"]),
                "gradients": gib(row["gradient_bytes_per_rank"]),
                "activations": gib(kept),
                "checkpointed": gib(less),
            }
        )
    return rows


def _peak(memory: Timeline, phase: Any = None) -> dict[str, int]:
    return {str(kind): num_bytes for kind, num_bytes in memory.peak(phase).items()}


def _host_bytes(memory: Timeline) -> int:
    columns = [KINDS.index(kind) for kind in memory.on_host]
    return int(memory.num_bytes[:, columns].sum(axis=1).max()) if columns else 0

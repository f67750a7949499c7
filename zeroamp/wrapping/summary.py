"""What a wrapped model weighs: the summary that `wrap_model` logs."""

from collections import Counter

from zeroamp.ledger.rows import PER_RANK, ledger_rows
from zeroamp.planning.plan import Plan
from zeroamp.planning.traffic import Ranks
from zeroamp.policies.dtypes import short_name

MIB = 1024**2


def size_summary(plan: Plan, ranks: Ranks, *, name: str, seconds: float) -> str:
    """Return lines about parameters, bytes per rank, units and groups of a model; `seconds` is what wrapping took.

    Bytes are those of the ledger: shards as stored, gradients as kept until the optimizer step, and what is gathered at
    a time at most if all units were gathered at once. What the optimizer will keep is not known yet.
    """
    policy = plan.policy
    numel = sum(param.numel for param in plan.params)
    trainable = sum(param.numel for param in plan.params if param.dtypes.gradient is not None)
    rows = ledger_rows(plan, ranks).groups
    stored, gathered, gradients = (sum(row[column] or 0 for row in rows) for column in PER_RANK)
    largest = max((row["gathered_bytes_per_rank"] or 0 for row in rows), default=0)
    kinds = Counter((group.kind, short_name(group.gather), short_name(group.wire)) for group in plan.groups)
    groups = ", ".join(f"{n} {kind} {gather}/{wire}" for (kind, gather, wire), n in kinds.items())
    modules = sum(len(plan.modules_of(unit)) for unit in plan.units)
    merged = f", merged of {modules} modules" if plan.merged else ""
    replicas = f" x {ranks.num_replicas} replicas" if (ranks.num_replicas or 1) > 1 else ""
    lines = [
        f"wrapped {name} in {seconds:.2f} s: mode {policy.mode}, ZeRO stage {policy.stage}, "
        f"{ranks.num_shards} shards{replicas}",
        f"  parameters: {numel:,}, {trainable:,} of them trainable",
        f"  per rank: {stored / MIB:,.1f} MiB of shards, {gradients / MIB:,.1f} MiB of gradients, and "
        f"{gathered / MIB:,.1f} MiB if all were gathered at once (the largest group: {largest / MIB:,.1f} MiB); then "
        "what the optimizer keeps",
        f"  units: {len(plan.units)} below the root{merged}",
        f"  groups, as gathered/reduced: {groups}",
    ]
    return "\n".join(lines)

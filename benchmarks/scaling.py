"""Bytes that a rank sends in one optimizer step, as ranks go from 2 to 16,384, at every ZeRO stage.

    python -m benchmarks.scaling [--model examples/models/llama3-8b] [--micro-batches 1] [--out FOLDER]

zeroamp's are counted: `zeroamp.planning.traffic.plan_traffic`, which `zeroamp.plan_run` reports and which equals what
training counts. It gives bytes B of the unsharded tensor, padded as FSDP2 pads it, per collective. The others are
formulae. With N ranks, a ring sends

    B (N - 1) / N        for an all-gather or a reduce-scatter, and an all-to-all as much (an own part stays)
    2 B (N - 1) / N      for an all-reduce

(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). Below, f is
(N - 1) / N; M micro-batches; P elements, S of them of Linear layers (safe), and W = 2 S + 4 (P - S) bytes.

DeepSpeed, with torch_autocast in bf16, as 0.19.8 does it (`runtime/engine.py` at stage 0; `average_tensor` and
`allreduce_bucket` of `runtime/zero/stage_1_and_2.py`; `__avg_scatter_grads` of `runtime/zero/stage3.py`; the gathers of
`runtime/zero/partition_parameters.py`), which the collectives of a watched run agree with. It partitions flat buffers,
whose padding is left out:

    stage 0   2 x 4 P f                                all-reduce in fp32
    stage 1   2 W f + 4 P f                            all-reduce at the boundary, then gather what was updated, in fp32
    stage 2   2 W f M + 4 P f                          the same all-reduce after every micro-batch
    stage 3   (3 W - 2 V) f M + 4 Q f                  two gathers and a reduce-scatter; Q elements (V bytes), those of
                                                       parameters of at most 1e5, stay gathered and are gathered again
                                                       after the step, in fp32

FSDP2, with gathers of a bytes per element and reductions of r (a = r = 4 beside `torch.autocast`; 2 and 2 with
MixedPrecisionPolicy(bf16, bf16)), after the docstring of `torch.distributed.fsdp.fully_shard`. P and R, the root's own
elements, are padded in dimension 0 to a multiple of N:

    stage 0   2 r P f                                  a mesh (N, 1): all-reduce at the boundary
    stage 1   (a + r) P f                              reshard_after_forward=False, no sync but in the last micro-batch
    stage 2   (a + r M) P f                            reshard_after_forward=False, set_reshard_after_backward(False)
    stage 3   (2 a (P - R) + a R + r P) f M            reshard_after_forward=True; the root stays for the backward
"""

import argparse
from collections.abc import Iterable, Sequence

from tabulate import tabulate

import zeroamp
from benchmarks.output import add_out, emit
from zeroamp.cli.model_source import load_model
from zeroamp.dry_run.checks import ranks_at
from zeroamp.planning.groups import ParamPlan
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.plan import Plan
from zeroamp.planning.shard_dim import numel_of_shards
from zeroamp.planning.traffic import plan_traffic
from zeroamp.policies.policy import Stage

NUM_RANKS = tuple(2**power for power in range(1, 15))
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
PERSISTENT = 100_000  # elements: DeepSpeed's default of stage3_param_persistence_threshold
GIB = 1024**3


def counted(plan: Plan, ranks: Ranks, num_ranks: int) -> float:
    """Return the bytes that a rank sends, from the counters of the plan."""
    num_bytes = plan_traffic(plan, ranks).num_bytes
    rounds = {key: 2 if key.collective == "all_reduce" else 1 for key in num_bytes}
    return sum(rounds[key] * moved for key, moved in num_bytes.items()) * _part(num_ranks)


def of_deepspeed(plan: Plan, num_ranks: int) -> float:
    """Return the same by the formulae for DeepSpeed."""
    total, wire = _elements_and_bytes(plan.params)
    persistent, kept = _elements_and_bytes(param for param in plan.params if param.numel <= PERSISTENT)
    num_micro_batches = plan.policy.gradient_accumulation_steps
    by_stage = {
        0: 2 * 4 * total,
        1: 2 * wire + 4 * total,
        2: 2 * wire * num_micro_batches + 4 * total,
        3: (3 * wire - 2 * kept) * num_micro_batches + 4 * persistent,
    }
    return by_stage[plan.policy.stage] * _part(num_ranks)


def of_fsdp2(plan: Plan, num_ranks: int, num_bytes: int) -> float:
    """Return the same by the formulae for FSDP2 with `num_bytes` per element in all collectives."""
    shards = 1 if plan.policy.stage == 0 else num_ranks
    total = sum(numel_of_shards(param.shape, 0, shards) for param in plan.params)
    root = sum(numel_of_shards(param.shape, 0, shards) for param in plan.params if not param.unit)
    num_micro_batches = plan.policy.gradient_accumulation_steps
    by_stage = {
        0: 2 * total,
        1: 2 * total,
        2: (1 + num_micro_batches) * total,
        3: (2 * (total - root) + root + total) * num_micro_batches,
    }
    return by_stage[plan.policy.stage] * num_bytes * _part(num_ranks)


def _elements_and_bytes(params: Iterable[ParamPlan]) -> tuple[int, int]:
    sizes = [(param.numel, param.numel * param.dtypes.param.itemsize) for param in params]
    return sum(numel for numel, _ in sizes), sum(num_bytes for _, num_bytes in sizes)


def _part(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def table(plan: Plan, num_ranks: Sequence[int]) -> str:
    """Return the Markdown of one stage, in GiB."""
    rows = []
    for n in num_ranks:
        columns = {
            "zeroamp": counted(plan, ranks_at(plan.policy, n, None), n),
            "DeepSpeed": of_deepspeed(plan, n),
            "FSDP2 fp32": of_fsdp2(plan, n, 4),
            "FSDP2 all bf16": of_fsdp2(plan, n, 2),
        }
        rows.append({"ranks": f"{n:,}", **{name: f"{value / GIB:.2f}" for name, value in columns.items()}})
    right = ("right",) * len(rows[0])
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True, colalign=right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/models/llama3-8b", help="as `zeroamp plan --model` takes it")
    parser.add_argument("--micro-batches", type=int, default=1, help="per optimizer step")
    add_out(parser)
    options = parser.parse_args()
    model = load_model(options.model)
    policy = zeroamp.policy_from_config(
        {
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
            "gradient_accumulation_steps": options.micro_batches,
        }
    )
    parts = [f"GiB that a rank sends in one optimizer step of {options.micro_batches} micro-batches, {options.model}"]
    for stage in STAGES:
        plan = zeroamp.build_plan(model, policy.replace(stage=stage))
        parts += [f"## Stage {stage}", table(plan, NUM_RANKS)]
    emit("scaling", parts, options.out)


if __name__ == "__main__":
    main()

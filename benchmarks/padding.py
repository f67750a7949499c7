"""The share of padding in what is stored and communicated, for 64 to 16,384 ranks, and what `zeroamp.shard_dim` saves.

    python -m benchmarks.padding [--models FOLDER_OR_FACTORY ...] [--experts FOLDER_OR_FACTORY] [--out FOLDER]

Padding is the ratio of elements with padding to elements, over all parameters: of the stored shards, of each unsharded
copy and of all collectives, at stages 1 to 3. It is computed from the plan of a model on the meta device, with
`zeroamp.shard_dim` 0, the default of FSDP2, and "auto". The second table is about the experts of a transformers model,
which are 3-D parameters: what a rank stores, and what is all-gathered when all run once.
"""

import argparse
from collections.abc import Sequence
from typing import Literal

from tabulate import tabulate

import zeroamp
from benchmarks.output import add_out, emit
from zeroamp.cli.model_source import load_model
from zeroamp.planning.groups import ParamPlan
from zeroamp.planning.plan import Plan
from zeroamp.planning.traffic import local_numel, padded_numel

NUM_RANKS = tuple(2**power for power in range(6, 15))
NUM_RANKS_OF_EXPERTS = (8, 64, 512)
MODELS = tuple(f"examples/models/{name}" for name in ("llama3-8b", "llama3-70b", "llama3-405b"))
EXPERTS = "examples/models/mixtral-8x7b"
KEYS: tuple[Literal[0, "auto"], ...] = (0, "auto")
GB = 1000**3


def plans_of(source: str) -> dict[Literal[0, "auto"], Plan]:
    """Return the plan of a model for both values of the key."""
    model = load_model(source)
    cfg = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    return {
        key: zeroamp.build_plan(model, zeroamp.policy_from_config({**cfg, "zeroamp": {"shard_dim": key}}))
        for key in KEYS
    }


def padding(params: Sequence[ParamPlan], num_ranks: int) -> float:
    """Return elements with padding / elements."""
    return sum(padded_numel(param, num_ranks) for param in params) / sum(param.numel for param in params)


def table_of_padding(sources: Sequence[str]) -> str:
    """Return a row per number of ranks, two columns per model."""
    plans = {source.rpartition("/")[2]: plans_of(source) for source in sources}
    rows = [
        {
            "ranks": f"{num_ranks:,}",
            **{
                f"{name}, {key}": f"{padding(plan.params, num_ranks):.3f}"
                for name, by_key in plans.items()
                for key, plan in by_key.items()
            },
        }
        for num_ranks in NUM_RANKS
    ]
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def table_of_experts(source: str) -> str:
    """Return a row per number of ranks and value of the key."""
    rows = []
    for key, plan in plans_of(source).items():
        experts = [param for param in plan.params if len(param.shape) == 3]
        numel = sum(param.numel for param in experts)
        for num_ranks in NUM_RANKS_OF_EXPERTS:
            stored = sum(local_numel(param, num_ranks) for param in experts)
            moved = sum(padded_numel(param, num_ranks) * param.dtypes.param.itemsize for param in experts)
            rows.append(
                {
                    "shard_dim": key,
                    "ranks": num_ranks,
                    "dimensions": ", ".join(sorted({str(param.shard_dim(num_ranks)) for param in experts})),
                    "elements per rank": f"{stored:,}",
                    "x ranks / all elements": f"{stored * num_ranks / numel:.3f}",
                    "fp32 GB stored per rank": f"{4 * stored / GB:.2f}",
                    "GB of one all-gather of all": f"{moved / GB:.1f}",
                }
            )
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, help="as `zeroamp plan --model` takes them")
    parser.add_argument("--experts", default=EXPERTS, help="a model with experts, taken in the same way")
    add_out(parser)
    options = parser.parse_args()
    experts = f"Experts of {options.experts.rpartition('/')[2]}, all-gathered in bf16\n\n"
    parts = [
        f"Elements with padding / elements\n\n{table_of_padding(options.models)}",
        experts + table_of_experts(options.experts),
    ]
    emit("padding", parts, options.out)


if __name__ == "__main__":
    main()

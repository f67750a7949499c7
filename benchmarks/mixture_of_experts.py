"""Mixtures of experts: the dtypes under autocast, the bytes that are all-gathered, and whether experts should be units.

    python -m benchmarks.mixture_of_experts [--ranks 8 64] [--out FOLDER]

Three tables: the dtype in which each experts implementation multiplies under bf16 autocast with this torch, without and
with "zeroamp": {"autocast_ops": ["grouped_mm"]}; the bytes that a step of Mixtral-8x7B's shape all-gathers, by the
ledger; and its planned memory and traffic at stage 3, with the decoder layers as units, and with their experts as units
inside. It runs in one process without weights: the model is on the meta device.
"""

import argparse
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import zeroamp
from benchmarks.output import add_out, emit
from zeroamp.hooks.precision.autocast_ops import casting, register
from zeroamp.ledger.explain import Ledger
from zeroamp.planning.plan import build_plan
from zeroamp.policies.policy import Policy

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
OPS = {"off": (), "on": ("grouped_mm",)}
UNITS = {"decoder layers": None, "and experts inside": {"MixtralDecoderLayer", "MixtralExperts"}}
GB = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--seq", type=int, default=4096)
    add_out(parser)
    options = parser.parse_args()
    with torch.device("meta"):
        model = _mixtral()
    tables = [_casts(), _bytes(model, options.ranks), _units(model, options.ranks, options.seq)]
    emit("mixture_of_experts", tables, options.out)


def _mixtral(**sizes: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    model: nn.Module = MixtralForCausalLM(MixtralConfig(**sizes))
    return model


def _policy(ops: tuple[str, ...]) -> Policy:
    return zeroamp.policy_from_config(
        {
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
            "zero_optimization": {"stage": 3},
            "zeroamp": {"autocast_ops": list(ops)},
        }
    )


def _casts() -> str:
    """Return a table of the dtypes of the products of tiny experts with fp32 weights, in each implementation."""
    model: Any = _mixtral(hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=64,
                          num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)  # fmt: skip
    experts = model.model.layers[0].mlp.experts
    arguments = torch.randn(6, 32), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    register(("grouped_mm",), "cpu")
    rows = []
    for implementation in IMPLEMENTATIONS:
        model.set_experts_implementation(implementation)
        row = {"experts implementation": implementation}
        for name, ops in OPS.items():
            inputs: list[torch.dtype] = []
            handle = experts.act_fn.register_forward_pre_hook(
                lambda _module, args, seen=inputs: seen.append(args[0].dtype)
            )
            with torch.autocast("cpu", dtype=torch.bfloat16), casting(frozenset(ops)):
                experts(*arguments)
            handle.remove()
            row[f"product, key {name}"] = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in inputs}))
        rows.append(row)
    return tabulate(rows, headers="keys", tablefmt="github")


def _bytes(model: nn.Module, ranks: list[int]) -> str:
    numel = sum(parameter.numel() for parameter in model.parameters())
    rows = []
    for name, ops in OPS.items():
        plan = build_plan(model, _policy(ops))
        for num_shards in (None, *ranks):
            gathered = sum(
                row["gathered_bytes_per_step"] for row in Ledger(plan=plan, num_shards=num_shards).group_rows()
            )
            rows.append(
                {
                    "key": name,
                    "ranks": num_shards or "any, without padding",
                    "trainable elements in bf16": f"{plan.low_share:.2%}",
                    "all-gathered per step, GB": round(gathered / GB, 1),
                    "of the bf16 parameters": round(gathered / (2 * numel), 2),
                }
            )
    return tabulate(rows, headers="keys", tablefmt="github")


def _units(model: nn.Module, ranks: list[int], seq: int) -> str:
    rows = []
    for checkpointing in (False, True):
        for name, units in UNITS.items():
            for world_size in ranks:
                run = zeroamp.plan_run(
                    model, _policy(OPS["on"]), world_size=world_size, batch=1, seq=seq, stages=(3,),
                    checkpointing=checkpointing, auto_wrap_policy=units,
                )  # fmt: skip
                (stage,) = run.stages
                rows.append(
                    {
                        "units": name,
                        "checkpointing": "yes" if checkpointing else "no",
                        "ranks": world_size,
                        "peak GiB": round(stage.memory.peak_bytes() / 2**30, 2),
                        "unsharded at the peak GiB": round(stage.memory.peak()["gathered parameters"] / 2**30, 2),
                        "GB per step": round(sum(stage.traffic.num_bytes.values()) / GB, 1),
                        "collectives": sum(stage.traffic.calls.values()),
                        "planned step s": round(stage.time.total, 2),
                    }
                )
    return tabulate(rows, headers="keys", tablefmt="github")


if __name__ == "__main__":
    main()

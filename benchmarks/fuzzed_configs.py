"""Passes random configs to `policy_from_config`, the builders, and `wrap_model` of a model on the meta device.

Every config must end in a ConfigError, in a WrapError that names a key of the config, or in a wrapped model whose
policy round-trips: `policy_from_config(json.loads(str(policy))) == policy`. Anything else is a failure, printed with
its config.

python -m benchmarks.fuzzed_configs --num 20000 --seed 0
"""

import argparse
import copy
import json
import random
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroamp
from benchmarks.output import add_out, emit
from zeroamp.policies.json_values import nest
from zeroamp.policies.schema import OPTIMIZER_PARAMS, SCHEDULER_PARAMS, Config, Unsupported, iter_keys
from zeroamp.policies.schema.keys import inner_block

NUMBERS = [0, 1, 2, 3, 4, 16, 1000, 100_000, 2**62, 2**70, -1, 5e8, 0.5, 1.0, 0.0, 1e-3, 256.0, 1e300, -0.0]
SPECIAL = [True, False, None, float("nan"), float("inf"), -float("inf"), torch.bfloat16, torch.float32, torch.int8]
TEXTS = ["auto", "fp32", "bf16", "torch.float16", "half", "int8", "cpu", "none", "nvme", "mean", "sum", "native",
         "Warn", "text", "", "false", "1e3", "Linear", "torch.nn.Linear", "allow", "nvtx", "off", "log", "linear",
         "adamw", "\ud800", "é" * 70, "{}", "a.b", "*", "?"]  # fmt: skip
LISTS = [[], ["Linear"], ["torch.nn.Linear", "Embedding"], ["norm"], ["1"], ["1.1"], ["Sequential"], ["*"], [1], [None],
         [[]], [0.9, 0.95], [0.9, 1.0], (0.8, 0.9), [1e-3], [1e-3, 1e-4]]  # fmt: skip
OVERRIDES = [
    [{"modules": "3", "compute": "fp32"}],
    [{"modules": ["LayerNorm"], "communication": "bf16"}],
    [{"modules": "1.1.*", "gather": "fp32", "communication": "fp32"}],
    [{"modules": "torch.nn.Embedding", "gather": "bf16"}],
    [{"modules": "Linear", "compute": "fp16"}],
    [{"modules": "Sequential", "compute": "bf16"}, {"modules": "LayerNorm", "compute": "fp32"}],
    [{"modules": "1.0", "communication": "bf16"}, {"modules": "*", "communication": "fp32"}],
    [{"modules": "nothing", "compute": "fp32"}],
    [{"modules": [], "compute": "fp32"}],
    [{"modules": "0"}],
    [{"modules": "0", "compute": "int8"}],
    [{"modules": 0, "gather": True}],
    [{"compute": "fp32"}],
    [{"modules": "3", "precision": "fp32"}],
]  # fmt: skip
BLOCKS = [{}, {"enabled": True}, {"enabled": False}, {"enabled": "auto"}, {"device": "cpu"}, {"a": {"b": {}}}]
POOL = [*NUMBERS, *SPECIAL, *TEXTS, *LISTS, *OVERRIDES, *BLOCKS]
MODES = [
    {},
    {"torch_autocast.enabled": True, "torch_autocast.dtype": "bfloat16"},
    {"torch_autocast.enabled": True, "torch_autocast.dtype": "half"},
    {"bf16.enabled": True},
    {"fp16.enabled": True},
]
ARGUMENTS = [{"hidden_size": 8}, {"lr": 1e-3}, {"bf16": True}, {"gradient_clipping": 1.0}, {"stage": 2}, {"enabled": 1}]


def key_values() -> dict[str, list[Any]]:
    """Return path of every key, those of `params` included -> the values of the pool that its type accepts."""
    found = {}
    blocks = [("", Config), *(("optimizer.params.", block) for block in OPTIMIZER_PARAMS.values())]
    blocks += [("scheduler.params.", block) for block in SCHEDULER_PARAMS.values()]
    for prefix, root in blocks:
        for key in iter_keys(root):
            block = root
            *outer, name = key.path.split(".")
            for part in outer:
                inner = inner_block(block.model_fields[part])
                assert inner is not None
                block = inner
            adapter: TypeAdapter[Any] = TypeAdapter(block.model_fields[name].rebuild_annotation())
            off = key.key_class.off if isinstance(key.key_class, Unsupported) else None
            values = [value for value in POOL if _fits(adapter, value) and (off is None or value in off)]
            found.setdefault(prefix + key.path, []).extend(values)
    return found


def _fits(adapter: TypeAdapter[Any], value: object) -> bool:
    try:
        adapter.validate_python(value, strict=True)
    except (ValidationError, OverflowError):
        return False
    return True


def configs(num: int, seed: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield configs, with the arguments for `policy_from_config`."""
    rng, values = random.Random(seed), key_values()
    paths = sorted(values)
    for _ in range(num):
        flat = dict(rng.choice(MODES)) | {"zero_optimization.stage": rng.randrange(4)}
        if rng.random() < 0.5:
            flat["optimizer.type"] = rng.choice([*OPTIMIZER_PARAMS, "adam", "Lamb"])
        if rng.random() < 0.4:
            flat["scheduler.type"] = rng.choice([*SCHEDULER_PARAMS, "warmuplr"])
            flat |= {"scheduler.params.total_num_steps": 10} if "Decay" in flat["scheduler.type"] else {}
        for path in rng.sample(paths, rng.randrange(7)):
            is_of_type = path.partition(".params.")[0] + ".type" in flat or ".params." not in path
            if is_of_type or rng.random() < 0.1:
                flat[path] = rng.choice(values[path] if values[path] and rng.random() < 0.98 else POOL)
        if rng.random() < 0.1:
            flat["zeroamp.overrides"] = rng.choice(OVERRIDES)
        if rng.random() < 0.05:  # a misspelled key
            path = rng.choice(paths)
            at = rng.randrange(len(path))
            flat[path[:at] + rng.choice("_x.é") + path[at + 1 :]] = rng.choice(POOL)
        if rng.random() < 0.05:  # a value for a block
            flat[rng.choice(paths).partition(".")[0]] = rng.choice(POOL)
        arguments = rng.choice(ARGUMENTS) if rng.random() < 0.1 else {}
        yield _nested(flat), arguments


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the nested config without the keys inside of another key's value."""
    return nest({path: value for path, value in flat.items() if not any(path.startswith(f"{o}.") for o in flat)})


def meta_model() -> nn.Sequential:
    """Return a small model on the meta device, with two blocks that are Sequentials."""
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2)]
        return nn.Sequential(nn.Embedding(7, 8), *blocks, nn.Linear(8, 7))


def outcome(cfg: dict[str, Any], arguments: dict[str, Any], known: set[str]) -> str:
    """Return how one config ended. Raises AssertionError for a failure."""
    where = "policy_from_config"
    try:
        policy = zeroamp.policy_from_config(cfg, world_size=1, **arguments)
        again = zeroamp.policy_from_config(json.loads(str(policy)), world_size=1)
        if again != policy or str(again) != str(policy):
            raise AssertionError(f"does not round-trip: {policy} is read as {again}")
        if policy.report().count("\n") < 2:
            raise AssertionError("has an empty report")
        where = "wrap_model"
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)) if len(cfg) % 2 else None
        model = zeroamp.wrap_model(meta_model(), policy, mesh, {"Sequential"}, torch.zeros(1, 3, dtype=torch.int64))
        where = "optimizer_from_config"
        optimizer = torch.optim.AdamW(model.parameters())
        if policy.optimizer is not None:
            optimizer = zeroamp.optimizer_from_config(policy, model.parameters())
        where = "scheduler_from_config"
        if policy.scheduler is not None:
            scheduler = zeroamp.scheduler_from_config(policy, optimizer)
            for _ in range(3):
                scheduler.step()
    except zeroamp.ConfigError:
        return f"ConfigError of {where}"
    except zeroamp.WrapError as error:
        if not any(key in str(error) for key in known):
            raise AssertionError(f"a WrapError that names no key: {error}") from error
        return f"WrapError of {where} that names a key"
    return "accepted, wrapped, and round-trips"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num", type=int, default=20_000, help="configs")
    parser.add_argument("--seed", type=int, default=0)
    add_out(parser)
    options = parser.parse_args()
    known = {path for path in key_values() if len(path) > 3}
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for index, (cfg, arguments) in enumerate(configs(options.num, options.seed)):
        if index % 500 == 0:  # each wrap may make process groups
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            print(index, dict(counts), file=sys.stderr, flush=True)
        before = copy.deepcopy(cfg)
        try:
            counts[outcome(cfg, arguments, known)] += 1
            if repr(cfg) != repr(before):
                raise AssertionError("the caller's config was changed")
        except Exception as error:
            counts["FAILURE"] += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {str(error)[:300]} (in {last.name})"
            failures.append(f"config {index}: {text} {cfg} {arguments}")
            print(failures[-1], file=sys.stderr, flush=True)
    rows = [{"outcome": name, "configs": number} for name, number in counts.most_common()]
    emit("fuzzed_configs", [tabulate(rows, headers="keys", tablefmt="github"), *failures], options.out)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()

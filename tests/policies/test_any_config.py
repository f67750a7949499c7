"""Random configs: each is a Policy that round-trips, every key accounted for, or a ConfigError that names the key."""

import json
import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from zeroamp import ConfigError, policy_from_config
from zeroamp.optimizers.optimizer_params import OPTIMIZER_PARAMS
from zeroamp.optimizers.scheduler_params import SCHEDULER_PARAMS
from zeroamp.policies.json_values import flatten, nest
from zeroamp.policies.schema.config import Config
from zeroamp.policies.schema.keys import Unsupported, iter_keys
from zeroamp.reporting.key_report import report_rows

POOL = [
    True, False, None, 0, 1, 2, 3, 4, 16, 1000, 100_000, 5e8, 0.5, 1.0, 0.0, 256.0, -1, float("nan"), float("inf"),
    "auto", "fp32", "bf16", "fp16", "half", "int8", "cpu", "none", "nvme", "mean", "sum", "native", "Warn", "text", "",
    [], ["Linear"], ["torch.nn.Linear"], [1], {}, {"enabled": False}, {"enabled": True}, "Linear",
    [{"modules": ["head"], "compute": "fp32"}], [{"modules": ["norm"], "param": "bf16", "communication": "bf16"}],
    [{"modules": ["head"], "compute": "fp16"}, {"modules": ["*"], "communication": "fp32"}], [{"modules": []}],
    [{"modules": ["head"]}], [{"modules": ["head"], "compute": 1}], [{"modules": ["head"], "fast": True}],
]  # fmt: skip
BLOCKS = [
    {}, {}, {}, {"optimizer.type": "AdamW"}, {"optimizer.type": "adam", "optimizer.params.betas": [0.9, 0.95]},
    {"optimizer.type": "SGD", "optimizer.params": None, "scheduler.type": "WarmupLR"}, {"optimizer.type": "Lamb"},
    {"scheduler.type": "WarmupLR", "scheduler.params.warmup_max_lr": 3e-4}, {"scheduler": None},
    {"scheduler.type": "WarmupCosineLR", "scheduler.params.total_num_steps": 10},
    {"scheduler.type": "WarmupDecayLR", "scheduler.params.total_steps": 10},
]  # fmt: skip
UNKNOWN = ["stag", "optimiser", "torch_autocast.enable", "zero_optimization.stage2", "zeroamp.fast", "fp16.scale"]


def _all_keys():
    """Every key's path and the values of the pool that its type takes."""
    keys = {}
    for key in iter_keys(Config):
        block = Config
        *blocks, name = key.path.split(".")
        for part in blocks:
            annotation = block.model_fields[part].annotation
            block = next(a for a in (annotation, *getattr(annotation, "__args__", ())) if hasattr(a, "model_fields"))
        field = block.model_fields[name]
        adapter = TypeAdapter(field.rebuild_annotation())
        off = key.key_class.off if isinstance(key.key_class, Unsupported) else None
        keys[key.path] = [value for value in POOL if _fits(adapter, value) and (off is None or value in off)]
    return keys


def _fits(adapter, value):
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


KEYS = _all_keys()


PARAMS = {f"optimizer.params.{key.path}" for block in OPTIMIZER_PARAMS.values() for key in iter_keys(block)} | {
    f"scheduler.params.{key.path}" for block in SCHEDULER_PARAMS.values() for key in iter_keys(block)
}


@st.composite
def configs(draw):
    flat = {}
    modes = draw(st.sampled_from([{}, {"torch_autocast.enabled": True, "torch_autocast.dtype": "bf16"},
                                  {"torch_autocast.enabled": True, "torch_autocast.dtype": "half"},
                                  {"bf16.enabled": True}, {"fp16.enabled": True}]))  # fmt: skip
    flat |= modes | {"zero_optimization.stage": draw(st.integers(0, 3))}
    flat |= draw(st.sampled_from(BLOCKS))
    for path in draw(st.lists(st.sampled_from(sorted(KEYS)), max_size=6, unique=True)):
        is_odd = draw(st.integers(0, 29)) == 0
        flat[path] = draw(st.sampled_from(POOL if is_odd or not KEYS[path] else KEYS[path]))
    if draw(st.integers(0, 19)) == 0:
        flat[draw(st.sampled_from(UNKNOWN))] = draw(st.sampled_from(POOL))
    return nest({path: value for path, value in flat.items() if not _is_inside(path, flat)})


def _is_inside(path, flat):
    return any(path.startswith(f"{other}.") for other in flat)


def _read(cfg, world_size, arguments):
    try:
        return policy_from_config(cfg, world_size=world_size, **arguments), ""
    except ConfigError as error:
        return None, str(error)


def _names_a_key(text, cfg, arguments):
    known = {*KEYS, *flatten(cfg), *(f"the argument {name}" for name in arguments)}
    known |= {path.rpartition(".")[0] for path in known} | PARAMS
    wheres = [re.match(r"(the argument )?[\w.]+", line).group() for line in text.splitlines()]
    return all(re.sub(r"\.\d+(\.\w+)?$", "", where) in known for where in wheres)  # of a list, an item or its key


@settings(max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    cfg=configs(),
    arguments=st.sampled_from([{}] * 9 + [{"gradient_clipping": 1.0}, {"hidden_size": 8}, {"lr": 1}]),
    world_size=st.sampled_from([None, 1, 2, 3] * 3 + [0]),
)
def test_any_config_is_a_policy_that_round_trips_or_an_error_that_names_the_key(cfg, arguments, world_size):
    policy, refusal = _read(cfg, world_size, arguments)
    if policy is None:
        assert _names_a_key(refusal, cfg, {**arguments, "world_size": world_size}), refusal
        return
    again = policy_from_config(json.loads(str(policy)), world_size=world_size)
    assert again == policy
    assert str(again) == str(policy)
    assert dict(policy.given).keys() <= {row["key"] for row in report_rows(policy)}

"""A policy as a config, and as a table of what became of each key."""

import json
import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from tabulate import tabulate

from zeroamp.policies.dtypes import short_name
from zeroamp.policies.errors import ConfigError, describe
from zeroamp.policies.load import flatten, nest
from zeroamp.policies.schema import Block, Config, Honoured, Key, Native, Unsupported, iter_keys

if TYPE_CHECKING:
    from zeroamp.policies.policy import Policy

_MONITORS = ("tensorboard", "csv_monitor", "wandb")


def to_config(policy: "Policy") -> dict[str, Any]:
    """Return the config, defaults written out, from which `policy_from_config` makes an equal policy.

    Native keys that were given are in it too.

    Raises:
        ConfigError: the policy holds a value that no config can say.
    """
    native = {key.path for key in iter_keys(Config) if isinstance(key.key_class, Native)}
    flat = {path: value for path, value in policy.given if path in native}
    flat |= flatten({path: value for path, value in _honoured(policy).items() if value is not None})
    places = {key.path: place for place, key in enumerate(iter_keys(Config))}
    # The keys of optimizer.params and scheduler.params come where those are.
    place = {path: places.get(path, places.get(path.rpartition(".")[0], 0)) for path in flat}
    return nest({path: flat[path] for path in sorted(flat, key=lambda path: place[path])})


def _honoured(policy: "Policy") -> dict[str, Any]:
    comm, autocast = policy.communication_data_type, policy.mode == "autocast"
    dtype = None if policy.low_dtype is None else short_name(policy.low_dtype)
    zero = {
        "stage": policy.stage,
        "stage3_param_persistence_threshold": policy.param_persistence_threshold,
        "stage3_max_live_parameters": policy.max_live_parameters,
        "stage3_prefetch_bucket_size": policy.prefetch_bucket_size,
        "reduce_bucket_size": policy.reduce_bucket_size,
        "zero_hpz_partition_size": policy.hpz_partition_size,
        **_offload(policy),
        "leaf_module.classes": list(policy.leaf_modules.classes),
        "leaf_module.names": list(policy.leaf_modules.names),
        "leaf_module.name_suffixes": list(policy.leaf_modules.name_suffixes),
        "stage3_gather_16bit_weights_on_model_save": policy.gather_16bit_weights_on_save,
    }
    return {
        "train_batch_size": policy.train_batch_size,
        "train_micro_batch_size_per_gpu": policy.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": policy.gradient_accumulation_steps,
        "gradient_clipping": policy.gradient_clipping,
        "torch_autocast.enabled": autocast,
        "torch_autocast.dtype": dtype if autocast else None,
        "torch_autocast.lower_precision_safe_modules": _names(policy.lower_precision_safe_modules)
        if autocast
        else None,
        "bf16.enabled": policy.mode == "bf16",
        "bf16.check_grad_overflow": policy.check_grad_overflow,
        "fp16.enabled": policy.mode == "fp16",
        **(_loss_scale(policy) if dtype == "fp16" else {}),
        "data_types.grad_accum_dtype": short_name(policy.grad_accum_dtype),
        "data_types.buffer_dtype": None if policy.buffer_dtype is None else short_name(policy.buffer_dtype),
        "data_types.keep_in_fp32_modules": _names(policy.keep_in_fp32_modules),
        "communication_data_type": None if comm is None else short_name(comm),
        **{f"zero_optimization.{name}": value for name, value in zero.items()},
        "steps_per_print": policy.steps_per_print,
        "wall_clock_breakdown": policy.wall_clock_breakdown,
        **{name: _block(getattr(policy, name)) for name in _MONITORS},
        "optimizer": _block(policy.optimizer),
        "scheduler": _block(policy.scheduler),
        "zeroamp.reduce_accumulate_dtype": policy.reduce_accumulate_dtype,
        "zeroamp.external_autocast": policy.external_autocast,
        "zeroamp.dp_replicate_size": policy.dp_replicate_size,
        "zeroamp.count_traffic": policy.count_traffic,
        "zeroamp.ranges": policy.ranges,
        "zeroamp.recovery": policy.recovery,
        "zeroamp.share_casts": policy.share_casts,
        "zeroamp.reduce_scatter_input_buffers": policy.reduce_scatter_input_buffers,
        "zeroamp.separate_reduce_scatter_group": policy.separate_reduce_scatter_group,
    }


def _names(names: tuple[str, ...] | Literal["auto"]) -> list[str] | str:
    return "auto" if names == "auto" else list(names)


def _block(block: Block | None) -> dict[str, Any] | None:
    return None if block is None else block.model_dump(mode="json", exclude_none=True)


def _offload(policy: "Policy") -> dict[str, Any]:
    """FSDP2 knows one offload of everything, which `offload_optimizer` alone says."""
    if not policy.offload.to_cpu:
        return {}
    return {"offload_optimizer.device": "cpu", "offload_optimizer.pin_memory": policy.offload.pin_memory}


def _loss_scale(policy: "Policy") -> dict[str, Any]:
    scale = policy.loss_scale
    if not scale.dynamic:
        return {"fp16.loss_scale": scale.initial}
    power = math.log2(scale.initial)
    if not power.is_integer():
        found = f"the initial scale {scale.initial:g}"
        raise ConfigError(describe("fp16.initial_scale_power", found, "a power of two", "Change Policy.loss_scale."))
    return {
        "fp16.loss_scale": 0,
        "fp16.initial_scale_power": int(power),
        "fp16.loss_scale_window": scale.window,
        "fp16.hysteresis": scale.hysteresis,
        "fp16.consecutive_hysteresis": scale.consecutive_hysteresis,
        "fp16.min_loss_scale": scale.minimum,
    }


def report_rows(policy: "Policy") -> list[dict[str, str]]:
    """Return one dict per key that was given or has a default that acts: key, value, status, note.

    The status is "honoured", "native" (accepted, changes nothing, and why), "off" (an unsupported key with a value that
    asks for nothing), "no effect" (a key of a mode or stage that is not on) or "default".
    """
    given, effective = dict(policy.given), flatten(to_config(policy))
    rows = []
    for key in iter_keys(Config):
        mine = {path: value for path, value in given.items() if path == key.path or path.startswith(f"{key.path}.")}
        for path, value in mine.items():
            status, note = _status(path, value, key, policy)
            rows.append({"key": path, "value": json.dumps(value, default=str), "status": status, "note": note})
        if not mine and key.path in effective and isinstance(key.key_class, Honoured):
            value = json.dumps(effective[key.path])
            rows.append({"key": key.path, "value": value, "status": "default", "note": key.key_class.note})
    rows += [
        {"key": path, "value": json.dumps(value), "status": "default", "note": "an empty block"}
        for path, value in given.items()
        if path not in {row["key"] for row in rows}
    ]
    order = ("honoured", "native", "off", "no effect", "default")
    return sorted(rows, key=lambda row: order.index(row["status"]))


def _status(path: str, value: Any, key: Key, policy: "Policy") -> tuple[str, str]:
    key_class, depth = key.key_class, key.path.count(".")
    if isinstance(key_class, Native):
        return "native", key_class.note
    if isinstance(key_class, Unsupported):
        is_key = path.count(".") == depth
        return "off", "asks for nothing; any other value is refused" if is_key else "its block is off"
    if reason := _idle(path, policy):
        return "no effect", reason
    return "default" if value is None else "honoured", key_class.note


def _idle(path: str, policy: "Policy") -> str | None:
    """Say why an honoured key does nothing in this policy, or return None if it does something."""
    block, _, name = path.rpartition(".")
    if block in _MONITORS and name != "enabled" and getattr(policy, block) is None:
        return f"{block} is not enabled"
    if block == "torch_autocast" and name != "enabled" and policy.mode != "autocast":
        return "torch_autocast is not enabled"
    if block == "bf16" and name != "enabled" and policy.mode != "bf16":
        return "bf16 is not enabled"
    if block == "fp16" and name != "enabled" and policy.gather_dtype != torch.float16:
        return "nothing computes in float16"
    if block == "fp16" and name not in ("enabled", "loss_scale") and not policy.loss_scale.dynamic:
        return "fp16.loss_scale fixes the scale"
    if name in ("stage3_max_live_parameters", "stage3_prefetch_bucket_size") and policy.stage != 3:
        return f"stage is {policy.stage}"
    if name == "external_autocast" and policy.mode == "autocast":
        return "torch_autocast wins over any other"
    if name == "keep_in_fp32_modules" and policy.mode == "fp32":
        return "everything is in fp32"
    if name == "pin_memory" and not policy.offload.to_cpu:
        return "nothing is offloaded"
    if name in ("grad_accum_dtype", "gradient_accumulation_dtype") and policy.gradient_accumulation_steps == 1:
        return "gradient_accumulation_steps is 1"
    return None


def render_report(policy: "Policy") -> str:
    """Return the rows as a table."""
    widths = [None, 32, None, 72]
    return tabulate(report_rows(policy), headers="keys", tablefmt="simple", disable_numparse=True, maxcolwidths=widths)

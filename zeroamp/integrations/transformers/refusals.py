"""Refuses arguments and models that a Trainer on zeroamp does not support, before anything is built."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import TrainingArguments

from zeroamp.policies.errors import ConfigError, WrapError
from zeroamp.wrapping.state import is_wrapped

_REASONS = {
    "fsdp": "zeroamp shards the model itself. Leave it out, and set zero_optimization.stage in the config.",
    "deepspeed": "zeroamp replaces DeepSpeed. Leave it out, and pass the file as zeroamp instead.",
    "parallelism_config": (
        "A Trainer gives each rank its own samples. Leave it out. For tensor or context parallelism, write a loop with "
        "zeroamp.wrap_model: docs/meshes.md."
    ),
    "auto_find_batch_size": (
        "An out-of-memory error on one rank leaves the others in a collective. Leave it out; `zeroamp plan` computes "
        "the largest batch before the run."
    ),
    "fp16_full_eval": "It casts the model, whose shards are the master weights. Evaluation has the config's autocast.",
    "bf16_full_eval": "It casts the model, whose shards are the master weights. Evaluation has the config's autocast.",
    "save_on_each_node": "Each rank writes its own part of a checkpoint. Set output_dir to a shared file system.",
    "enable_jit_checkpoint": (
        "All ranks must save at the same optimizer step, but the signal may reach them in different ones. Use "
        "the callback that docs/transformers.md shows."
    ),
}
"""Argument -> why it is refused if it is set."""


def refuse_arguments(args: TrainingArguments) -> None:
    """Raise ConfigError for arguments of the Trainer that a wrapped model cannot honour. It names all of them."""
    given: Any = args
    refused = [(name, reason) for name, reason in _REASONS.items() if getattr(given, name, None)]
    checkpointing = getattr(given, "activation_checkpointing_kwargs", None) or {}
    if checkpointing.get("use_reentrant"):
        reason = (
            "Reentrant checkpointing loses the gradients of a block that runs twice in a forward. Leave it out, or "
            "pass False."
        )
        refused.append(("gradient_checkpointing_kwargs['use_reentrant']", reason))
    accumulation = getattr(given.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    if accumulation.get("sync_each_batch"):
        refused.append(
            (
                "accelerator_config.gradient_accumulation_kwargs['sync_each_batch']",
                "The ZeRO stage decides it: stages 2 and 3 reduce after every micro-batch. Leave it out.",
            )
        )
    if given.n_gpu > 1:
        refused.append(
            ("n_gpu", f"One process has {given.n_gpu} GPUs, which DataParallel would use. Start it with torchrun.")
        )
    if refused:
        lines = "".join(f"\n- {name}: {reason}" for name, reason in refused)
        raise ConfigError(f"zeroamp does not support these TrainingArguments:{lines}")


def refuse_model(model: nn.Module) -> None:
    """Raise WrapError for a model that is distributed already, unless `zeroamp.wrap_model` did it."""
    if is_wrapped(model):
        return
    remedy = "Pass the plain model to the Trainer, which wraps it."
    kinds = (DistributedDataParallel, DataParallel, FSDPModule, FullyShardedDataParallel)
    found = next((module for module in model.modules() if isinstance(module, kinds)), None)
    if found is not None:
        raise WrapError(f"The model is or contains a {type(found).__name__} already. {remedy}")
    if getattr(model, "is_distributed_loading_by_transformers", False) or (getattr(model, "tp_size", None) or 1) > 1:
        raise WrapError(
            "The model was sharded by from_pretrained (distributed_config or tp_plan), which zeroamp cannot wrap. "
            "Load it without these arguments; zeroamp.integrations.transformers.from_pretrained reads a part per rank."
        )
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        raise WrapError("The model was spread over devices (device_map). Load it without device_map.")

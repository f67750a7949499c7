"""Names of DeepSpeed's API that zeroamp refuses, each with a reason or a replacement, and the error for them.

docs/deepspeed-api.md has these tables.
"""

from collections.abc import Iterable
from difflib import get_close_matches

from zeroamp.policies.errors import ZeroAmpError, some_of

_INFERENCE = "zeroamp trains. Run inference with model.eval() under torch.no_grad(), or export the weights: "
_PIPELINE = "There is no pipeline parallelism. Pass an nn.Module to initialize(), which shards it over all ranks."
_EXPERTS = "There are no expert-parallel layers. Train the mixture of experts unchanged: docs/moe.md."
_CUDA_KERNELS = "It is a kernel of DeepSpeed. Use the model's own layer: torch.compile fuses it."
_PARALLEL = "initialize() shards over all ranks. Call zeroamp.wrap_model for tensor or context axes: docs/meshes.md."
_OPTIMIZER = "torch has no such optimizer. Pass an optimizer of your own to initialize(optimizer=)."
_OFFLOAD = 'Shards stay where the config puts them: set "offload_optimizer": {"device": "cpu"}.'
_BACKWARD = "Call engine.backward(loss): it scales the loss and runs the backward."

PACKAGE: dict[str, str] = {
    "init_inference": f"{_INFERENCE}engine.save_16bit_model(folder).",
    "InferenceEngine": f"{_INFERENCE}engine.save_16bit_model(folder).",
    "default_inference_config": f"{_INFERENCE}engine.save_16bit_model(folder).",
    "DeepSpeedInferenceConfig": f"{_INFERENCE}engine.save_16bit_model(folder).",
    "DeepSpeedHybridEngine": f"{_INFERENCE}model.generate works on a wrapped model.",
    "PipelineModule": _PIPELINE,
    "PipelineEngine": _PIPELINE,
    "pipe": _PIPELINE,
    "tp_model_init": _PARALLEL,
    "sequence": _PARALLEL,
    "domino": _PARALLEL,
    "DeepSpeedTransformerLayer": _CUDA_KERNELS,
    "DeepSpeedTransformerConfig": _CUDA_KERNELS,
    "replace_transformer_layer": _CUDA_KERNELS,
    "revert_transformer_layer": _CUDA_KERNELS,
    "module_inject": _CUDA_KERNELS,
    "compression": "There is no compression of models.",
    "DeepSpeedConfig": "Call zeroamp.policy_from_config(config), which reads the same keys.",
    "add_tuning_arguments": 'Write the scheduler in the config: "scheduler": {"type": "WarmupLR", ...}.',
}
"""Name of the package -> why it is refused."""

ENGINE: dict[str, str] = {
    "train_batch": _PIPELINE,
    "eval_batch": _PIPELINE,
    "set_dataloader": _PIPELINE,
    "scale": _BACKWARD,
    "allreduce_gradients": "The last backward of an optimizer step reduces the gradients.",
    "coalesce_grad_reduction": "Call set_gradient_accumulation_boundary(False) before all backwards but the last.",
    "offload_states": _OFFLOAD,
    "reload_states": _OFFLOAD,
    "monitor": "Set a monitor in the config, or append a zeroamp.Callback to engine.train_step.callbacks.",
    "timers": 'Set "wall_clock_breakdown": true, or construct zeroamp.RunReport(engine.train_step, path).',
    "tput_timer": "Construct zeroamp.RunReport(engine.train_step, path).",
    "flops_profiler": "Call zeroamp.count_flops(model, batch) before initialize().",
    "get_pld_theta": "There is no progressive layer drop.",
    "progressive_layer_drop": "There is no progressive layer drop.",
    "set_custom_curriculum_learning_schedule": "There is no curriculum learning.",
    "set_data_post_process_func": "Pass collate_fn= to initialize().",
    "mpu": _PARALLEL,
    "get_sequence_parallel_group": _PARALLEL,
    "module_inject": _CUDA_KERNELS,
    "checkpoint_engine": "engine.save_checkpoint calls zeroamp.save_checkpoint.",
}
"""Attribute of the engine -> why it is refused."""

ZERO: dict[str, str] = {
    "MiCS_Init": 'Pass "zeroamp": {"dp_replicate_size": N} in the config: shards are then replicated N times.',
    "TiledLinear": "FSDP2 unshards a whole layer. Split a layer that is too large into several nn.Linear.",
    "TiledLinearReturnBias": "FSDP2 unshards a whole layer. Split a layer that is too large into several nn.Linear.",
    "DeepSpeedZeRoOffload": "Call initialize(model=, config=) without an optimizer: it shards the model.",
    "unwrap_model_for_generation": "model.generate works on a wrapped model.",
}
"""Name of `zero` -> why it is refused."""

OPS: dict[str, str] = {
    "FusedLamb": _OPTIMIZER,
    "DeepSpeedCPULion": _OPTIMIZER,
    "FusedLion": _OPTIMIZER,
    "DeepSpeedCPUAdagrad": "Pass torch.optim.Adagrad to initialize(optimizer=).",
    "OnebitAdam": _OPTIMIZER,
    "ZenFlowCPUAdam": _OPTIMIZER,
    "ZenFlowSelectiveAdamW": _OPTIMIZER,
}
"""Optimizer of `ops` -> why it is refused."""

EXPERTS: dict[str, str] = {
    "MoE": _EXPERTS,
}
"""Name of `moe.layer` -> why it is refused."""


class UnsupportedError(ZeroAmpError, AttributeError):
    """A part of DeepSpeed's API that zeroamp does not have, or an unknown name. The text names a replacement."""


def refusal(name: str, reason: str) -> UnsupportedError:
    """Return the error for a name of DeepSpeed's API that is refused."""
    return UnsupportedError(f"{name} of DeepSpeed's API is refused. {reason}")


def unknown(owner: str, name: str, valid: Iterable[str]) -> UnsupportedError:
    """Return the error for a name that `owner` does not have. It lists close names, or else all valid ones."""
    names = sorted(valid)
    found = get_close_matches(name, names, n=3, cutoff=0.6)
    hint = f"Close names are: {', '.join(found)}." if found else f"Valid names are: {some_of(names, 60)}."
    return UnsupportedError(f"{owner} has no {name!r}. {hint} docs/deepspeed-api.md has all of them.")


class Refused:
    """Stands for a refused name: it can be imported, but raises when it is called, read or used as a base class."""

    def __init__(self, name: str, reason: str) -> None:
        self._name, self._reason = name, reason

    def __call__(self, *_args: object, **_kwargs: object) -> None:
        """Raise UnsupportedError."""
        raise refusal(self._name, self._reason)

    def __getattr__(self, attribute: str) -> object:
        if attribute.startswith("__"):  # pickle, inspect and doctest look for these
            raise AttributeError(attribute)
        raise refusal(f"{self._name}.{attribute}", self._reason)

    def __mro_entries__(self, _bases: tuple[object, ...]) -> tuple[type, ...]:
        raise refusal(self._name, self._reason)

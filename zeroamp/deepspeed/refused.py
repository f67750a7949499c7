"""Names of DeepSpeed's API that zeroamp refuses, each with a reason or a replacement, and the error for them.

docs/deepspeed-api.md has this table.
"""

from collections.abc import Iterable
from difflib import get_close_matches

from zeroamp.policies.errors import ZeroAmpError, some_of

_NAMES = {
    "zeroamp trains. Run inference with model.eval() under torch.no_grad(), or call engine.save_16bit_model(folder).": (
        "init_inference InferenceEngine DeepSpeedInferenceConfig default_inference_config inference "
        "model_implementations"
    ),
    "There is no pipeline engine. Run torch's schedules on parts that zeroamp.wrap_model wrapped: docs/pipelines.md.": (
        "PipelineModule PipelineEngine pipe runtime.pipe engine.train_batch engine.eval_batch engine.set_dataloader"
    ),
    "There are no expert-parallel layers. Train the mixture of experts unchanged: docs/moe.md.": (
        "moe module_inject.auto_ep_layer utils.groups"
    ),
    "It is a kernel of DeepSpeed. Use the model's own layer: torch.compile fuses it.": (
        "DeepSpeedTransformerLayer DeepSpeedTransformerConfig replace_transformer_layer revert_transformer_layer "
        "module_inject engine.module_inject kernels ops"
    ),
    "initialize() shards over all ranks. Call zeroamp.wrap_model for tensor or context axes: docs/meshes.md.": (
        "tp_model_init set_optimizer_flags sequence domino runtime.tensor_parallel runtime.sequence_parallel engine.mpu"
    ),
    "Start the script with torchrun: it replaces the `deepspeed` launcher.": "launcher elasticity comm.mpi_discovery",
    "initialize(config=) and zeroamp.policy_from_config(config) read the config. engine.policy has its values.": (
        "DeepSpeedConfig runtime.config runtime.config_utils runtime.zero.config runtime.zero.offload_config"
    ),
    "Call initialize() with another config: the batch sizes of an engine do not change.": (
        "engine.set_train_batch_size engine.set_train_micro_batch_size"
    ),
    "engine.optimizer.param_groups has the values of each param group.": "engine.get_mom engine.get_type engine.set_lr",
    'Write "scheduler": {"type": "WarmupLR", ...} in the config, or pass initialize(lr_scheduler=).': (
        "runtime.lr_schedules add_tuning_arguments"
    ),
    "Run `zero_to_fp32.py . OUTPUT --safe_serialization` in DeepSpeed's folder, then zeroamp.load_hf on OUTPUT. Call "
    "engine.save_16bit_model for a run of zeroamp.": ("utils.zero_to_fp32 checkpoint"),
    "Call zeroamp.full_parameter, full_gradient or set_full_parameter; state has full_tensor(): docs/full-tensors.md": (
        "utils.safe_get_full_fp32_param utils.safe_get_full_grad utils.safe_get_full_optimizer_state "
        "utils.safe_set_full_fp32_param utils.safe_set_full_grad utils.safe_set_full_optimizer_state "
        "utils.safe_update_full_grad_vectorized utils.tensor_fragment"
    ),
    "Parameters, param.grad and engine.optimizer.state are DTensors: to_local() returns this rank's shard.": (
        "utils.safe_get_local_fp32_param utils.safe_get_local_grad utils.safe_get_local_optimizer_state "
        "utils.safe_set_local_fp32_param utils.safe_set_local_grad utils.safe_set_local_optimizer_state"
    ),
    "Construct zeroamp.RunReport(engine.train_step, path): it has the time of each part of every step.": (
        "utils.timer engine.timers engine.tput_timer"
    ),
    "Use torch.utils.flop_counter.FlopCounterMode before initialize(), or zeroamp.Profile for the time of each part.": (
        "profiling engine.flops_profiler utils.nvtx utils.instrument_w_nvtx"
    ),
    "zeroamp.traffic(model) has calls and bytes of every collective.": (
        "comm.log_summary comm.configure utils.comms_logging"
    ),
    "Append a zeroamp.Callback to engine.train_step.callbacks.": ("monitor engine.monitor"),
    'Build the model under `with torch.device("meta")`: initialize() then initialises it on shards.': (
        "OnDevice utils.OnDevice utils.init_on_device"
    ),
    'Pass "zeroamp": {"dp_replicate_size": N} in the config: shards are then replicated N times.': (
        "zero.MiCS_Init comm.initialize_mesh_device runtime.zero.mics runtime.zero.mics_utils"
    ),
    "It is inside DeepSpeed, or zeroamp has nothing like it: docs/deepspeed-api.md lists what there is.": (
        "runtime autotuning compile compression io linear nvme comm.backend comm.ccl comm.config comm.constants "
        "comm.reduce_op comm.utils compat constants datastates env_report git_version_info nebula utils.bwc "
        "utils.config utils.debug utils.exceptions utils.numa utils.types"
    ),
    "Pass an optimizer of torch, or of your own, to initialize(optimizer=).": (
        "ops.adagrad ops.lamb ops.lion ops.muon ops.adam.FusedLamb ops.adam.DeepSpeedCPULion ops.adam.OnebitAdam"
    ),
    "Call torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False).": (
        "checkpointing runtime.activation_checkpointing"
    ),
    "Call engine.backward(loss): it scales the loss. The last one of an optimizer step reduces the gradients.": (
        "engine.scale engine.allreduce_gradients"
    ),
}
"""Reason -> names below `deepspeed` that are refused for it, and of the engine. What is below a name is refused too."""

REFUSED = {name: reason for reason, names in _NAMES.items() for name in names.split()}
"""Name of an attribute or a submodule -> why it is refused."""


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

    def __iter__(self) -> None:
        raise refusal(self._name, self._reason)

    def __instancecheck__(self, _instance: object) -> bool:
        return False  # nothing is an instance of a refused class

    def __mro_entries__(self, _bases: tuple[object, ...]) -> tuple[type, ...]:
        raise refusal(self._name, self._reason)


def reason_of(name: str) -> str | None:
    """Return why a name below `deepspeed`, or a module that it is in, is refused; None if it is not."""
    while name not in REFUSED and "." in name:
        name = name.rpartition(".")[0]
    return REFUSED.get(name)


def missing(module: str, name: str, valid: Iterable[str]) -> Refused:
    """Return the refused `name` of a module of this package, for its `__getattr__`.

    Raises:
        UnsupportedError: the table does not have the name. The text has close ones of `valid`.
    """
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    inside = f"{module}.{name}".removeprefix("zeroamp.deepspeed.")
    valid = [each for each in valid if not each.startswith("_")]
    reason = None if inside not in REFUSED and get_close_matches(name, valid) else reason_of(inside)
    if reason is None:
        raise unknown(module, name, valid)
    return Refused(f"deepspeed.{inside}", reason)

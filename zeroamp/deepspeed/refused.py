"""Names of DeepSpeed's API that zeroamp refuses, each with a reason or a replacement, and the error for them.

docs/deepspeed-api.md has this table.
"""

from collections.abc import Iterable
from difflib import get_close_matches

from zeroamp.policies.errors import ZeroAmpError, some_of

_NAMES = {
    "zeroamp trains. Run inference with model.eval() under torch.no_grad(), or call engine.save_16bit_model(folder).": (
        "init_inference InferenceEngine default_inference_config DeepSpeedInferenceConfig inference "
        "model_implementations"
    ),
    "model.generate works on a wrapped model.": (
        "DeepSpeedHybridEngine runtime.hybrid_engine runtime.rollout zero.unwrap_model_for_generation"
    ),
    "There is no pipeline parallelism. Pass an nn.Module to initialize(), which shards it over all ranks.": (
        "PipelineModule PipelineEngine pipe runtime.pipe engine.train_batch engine.eval_batch engine.set_dataloader"
    ),
    "There are no expert-parallel layers. Train the mixture of experts unchanged: docs/moe.md.": (
        "moe.MoE moe.layer moe.experts moe.sharded_moe moe.mappings moe.capacity_bins moe.ep_count moe.ep_experts "
        "moe.ep_kernels moe.ep_repack moe.ep_router moe.ep_tp_dispatch moe.fused_expert_layout "
        "module_inject.auto_ep_layer"
    ),
    "It is a kernel of DeepSpeed. Use the model's own layer: torch.compile fuses it.": (
        "DeepSpeedTransformerLayer DeepSpeedTransformerConfig replace_transformer_layer revert_transformer_layer "
        "module_inject engine.module_inject git_version_info env_report kernels "
        "ops.transformer ops.sparse_attention ops.deepspeed4science ops.fp_quantizer ops.quantizer ops.random_ltd "
        "ops.op_builder ops.csrc ops.compile ops.triton ops.triton_ops ops.pin_memory ops.adam.multi_tensor_apply"
    ),
    "initialize() shards over all ranks. Call zeroamp.wrap_model for tensor or context axes: docs/meshes.md.": (
        "tp_model_init set_optimizer_flags sequence domino runtime.domino runtime.tensor_parallel "
        "runtime.sequence_parallel runtime.tiled_mlp engine.mpu engine.get_sequence_parallel_group"
    ),
    "There are no groups of experts or of tensor parallelism: use comm's functions.": "utils.groups",
    "Shards stay on the device, or on the CPU with offload_optimizer. Disks are not used.": (
        "io nvme ops.aio ops.gds runtime.swap_tensor runtime.superoffload runtime.zenflow"
    ),
    "peft trains adapters, on quantized bases too: docs/peft.md.": "linear",
    "There is no compression of models or gradients.": (
        "compression runtime.compression runtime.quantize runtime.weight_quantizer runtime.eigenvalue "
        "runtime.sparse_tensor"
    ),
    "zeroamp does not have DeepCompile. Call engine.compile().": "compile runtime.compiler",
    "There is no search for a config. `zeroamp plan` shows memory and the largest batch that fits.": "autotuning",
    "Start the script with torchrun: it replaces the `deepspeed` launcher.": "launcher elasticity comm.mpi_discovery",
    "initialize(config=) and zeroamp.policy_from_config(config) read the config.": (
        "DeepSpeedConfig runtime.config runtime.config_utils runtime.constants runtime.zero.config "
        "runtime.zero.offload_config runtime.precision_config runtime.model_checkpointing constants monitor.config"
    ),
    'Write the scheduler in the config, "scheduler": {"type": "WarmupLR", ...}, or pass initialize(lr_scheduler=). In '
    "place of OneCycle and LRRangeTest, torch.optim.lr_scheduler has CyclicLR, OneCycleLR and LambdaLR.": (
        "runtime.lr_schedules add_tuning_arguments"
    ),
    "DeepSpeed's own script converts folders that DeepSpeed wrote: `zero_to_fp32.py . OUTPUT --safe_serialization`. "
    "zeroamp.load_hf reads the result. engine.save_16bit_model writes the weights of a run of zeroamp.": (
        "utils.zero_to_fp32 checkpoint"
    ),
    "Construct zeroamp.RunReport(engine.train_step, path): it has the time of each part of every step.": (
        "utils.timer engine.timers engine.tput_timer"
    ),
    "Use torch.utils.flop_counter.FlopCounterMode before initialize(), or zeroamp.Profile for the time of each part.": (
        "profiling engine.flops_profiler"
    ),
    "zeroamp.traffic(model) has calls and bytes of every collective.": (
        "comm.log_summary comm.configure utils.comms_logging"
    ),
    "Append a zeroamp.Callback to engine.train_step.callbacks.": ("monitor engine.monitor"),
    'Pass "zeroamp": {"dp_replicate_size": N} in the config: shards are then replicated N times.': (
        "zero.MiCS_Init comm.initialize_mesh_device runtime.zero.mics runtime.zero.mics_utils"
    ),
    "FSDP2 unshards a whole layer. Split a layer that is too large into several nn.Linear.": (
        "zero.TiledLinear zero.TiledLinearReturnBias runtime.zero.tiling"
    ),
    "Call initialize(model=, config=) without an optimizer: it shards the model.": (
        "zero.DeepSpeedZeRoOffload runtime.zero.parameter_offload"
    ),
    "It is inside DeepSpeed's engine. engine and engine.optimizer have what scripts read.": (
        "runtime.zero.stage3 runtime.zero.stage_1_and_2 runtime.zero.utils runtime.zero.linear runtime.bf16_optimizer "
        "runtime.fp16 runtime.base_optimizer runtime.checkpoint_engine runtime.comm runtime.torch_autocast "
        "runtime.state_dict_factory runtime.hybrid_engine_graph runtime.zero.contiguous_memory_allocator "
        "runtime.zero.leaf_module_config runtime.zero.partitioned_param_coordinator runtime.zero.test "
        "runtime.zero.partitioned_param_profiler comm.backend comm.ccl comm.config comm.constants comm.mori "
        "comm.reduce_op comm.utils compat datastates nebula utils.bwc utils.config utils.debug "
        "utils.exceptions utils.mixed_precision_linkage utils.numa utils.pin_memory utils.pin_memory_tracker "
        "utils.static_cache utils.types"
    ),
    "torch has no such optimizer. Pass an optimizer of your own to initialize(optimizer=).": (
        "ops.lamb ops.lion ops.muon runtime.zero.muon ops.adam.FusedLamb ops.adam.DeepSpeedCPULion ops.adam.FusedLion "
        "ops.adam.OnebitAdam ops.adam.ZenFlowCPUAdam ops.adam.ZenFlowSelectiveAdamW "
        "ops.adam.zenflow_cpu_adam ops.adam.zenflow_torch_adam"
    ),
    "Pass torch.optim.Adagrad to initialize(optimizer=).": "ops.adagrad ops.adam.DeepSpeedCPUAdagrad",
    "There is no curriculum learning, progressive layer drop or data analysis.": (
        "runtime.data_pipeline runtime.progressive_layer_drop engine.get_pld_theta engine.progressive_layer_drop "
        "engine.set_custom_curriculum_learning_schedule"
    ),
    "It is for tensor parallelism, which initialize() does not have. Call torch.manual_seed.": (
        "checkpointing.get_cuda_rng_tracker checkpointing.model_parallel_cuda_manual_seed"
    ),
    "Call checkpointing.checkpoint(function, *args).": (
        "checkpointing.CheckpointFunction runtime.activation_checkpointing"
    ),
    "Call engine.backward(loss): it scales the loss and runs the backward.": "engine.scale",
    "The last backward of an optimizer step reduces the gradients.": "engine.allreduce_gradients",
    "Call set_gradient_accumulation_boundary(False) before all backwards but the last.": (
        "engine.coalesce_grad_reduction"
    ),
    'Shards stay where the config puts them: set "offload_optimizer": {"device": "cpu"}.': (
        "engine.offload_states engine.reload_states runtime.zero.offload_states"
    ),
    "Pass collate_fn= to initialize().": "engine.set_data_post_process_func",
    "engine.save_checkpoint calls zeroamp.save_checkpoint.": "engine.checkpoint_engine",
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
    reason = reason_of(inside)
    if reason is None:
        raise unknown(module, name, valid)
    return Refused(f"deepspeed.{inside}", reason)

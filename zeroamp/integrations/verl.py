"""verl: an engine that trains a causal language model on zeroamp. Tested with verl 0.9.1.

Importing this module registers "zeroamp" in verl's `EngineRegistry`. verl imports it if VERL_USE_EXTERNAL_MODULES or
`model.external_lib` is "zeroamp.integrations.verl", or if it is the `_target_` of the engine's config in a YAML file.

[Note: Keys of verl]
A key of verl's configs has its effect or is an error. So the engine is no subclass of verl's FSDP engine, and has none
of its keys, but takes functions of it that load a model, run micro-batches and compute log-probabilities. `_refuse`
names what it does not do.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import torch
from verl.trainer.config import CheckpointConfig
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.py_functional import convert_to_regular_types
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.config import EngineConfig, FSDPOptimizerConfig, build_optimizer
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead as Fsdp

import zeroamp
from zeroamp.host_memory.sleep import PARTS, Part
from zeroamp.integrations.loop_driver import LoopDriver
from zeroamp.integrations.peft import iter_merged_weights

_FUNCTIONS = """_build_module _build_lora_module _build_lr_scheduler lr_scheduler_step prepare_model_inputs
prepare_model_outputs _get_packed_pad_size _gather_and_unpad_packed forward_step forward_backward_batch disable_adapter
get_data_parallel_rank get_data_parallel_size get_data_parallel_group is_mp_src_rank_with_outputs"""
_OfFsdpEngine: Any = type("_OfFsdpEngine", (), {name: getattr(Fsdp, name) for name in _FUNCTIONS.split()})


@dataclasses.dataclass
class ZeroampEngineConfig(EngineConfig):  # type: ignore[misc]
    """The keys of all engines of verl, and those below.

    `zeroamp` is the config: a mapping, or the path of a JSON file. `dtype` must be None or its low dtype. The model is
    loaded in `model_dtype`; trainable parameters are then sharded in fp32. The rollout gets weights in `weights_dtype`.
    """

    _mutable_fields = EngineConfig._mutable_fields | {"ulysses_sequence_parallel_size"}
    strategy: str = "zeroamp"
    zeroamp: Any = None
    dtype: str | None = None
    model_dtype: str = "fp32"
    weights_dtype: str = "bf16"
    entropy_checkpointing: bool = False
    pad_to_length: bool = False
    pad_to_length_bucket: int = 1024
    ulysses_sequence_parallel_size: int = 1
    entropy_from_logits_with_chunking = False  # no key, but read by prepare_model_outputs


class _Mode(BaseEngineCtx):  # type: ignore[misc]
    """The context of `train_mode` and `eval_mode`. What is offloaded is on the device inside."""

    def __enter__(self) -> None:
        self.engine.mode = self.mode
        self._context_switch("device")
        self.engine.module.train(self.mode == "train")

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or exc_type is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(exc_type, exc_value, traceback)


@EngineRegistry.register(model_type="language_model", backend="zeroamp", device=["cuda", "cpu"])
class ZeroampEngine(_OfFsdpEngine, BaseEngine):  # type: ignore[misc]
    """verl's engine interface. All ranks are data-parallel. See [Note: Keys of verl]."""

    # The functions of the FSDP engine read these. Without a mesh, the first of all ranks loads the model.
    ulysses_sequence_parallel_size, use_ulysses_sp, ulysses_device_mesh, device_mesh = 1, False, None, None
    compute_entropy_from_logits = staticmethod(entropy_from_logits)
    is_param_offload_enabled = property(lambda self: self.engine_config.param_offload)
    is_optimizer_offload_enabled = property(lambda self: self.engine_config.optimizer_offload)
    train_mode, eval_mode = partialmethod(_Mode, "train"), partialmethod(_Mode, "eval")

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        """Take verl's configs. Raises ConfigError for keys that would have no effect."""
        self.model_config, self.engine_config, self.optimizer_config = model_config, engine_config, optimizer_config
        policy = zeroamp.policy_from_config(convert_to_regular_types(engine_config.zeroamp))
        given, as_in_verl = dict(policy.given), ("zeroamp.sync_module_states", "zeroamp.skip_nonfinite_steps")
        self.policy = policy.replace(**{key: True for key in as_in_verl if key not in given})
        _refuse(self, checkpoint_config or CheckpointConfig())
        self.rank, self.use_remove_padding = torch.distributed.get_rank(), model_config.use_remove_padding
        self.pad_to_length, self.pad_to_length_bucket = engine_config.pad_to_length, engine_config.pad_to_length_bucket
        self._autocast_dtype = self.policy.low_dtype or torch.float32
        # The loop over micro-batches calls `scaler.scale(loss).backward()`. The driver scales the loss.
        self.scaler = SimpleNamespace(scale=lambda loss: SimpleNamespace(backward=lambda: self._driver.backward(loss)))
        self._weights_dtype = PrecisionType.to_dtype(engine_config.weights_dtype)
        self._asleep: set[Part] = set()
        self._saved = BaseCheckpointManager(None, None)

    def initialize(self) -> None:
        """Load and wrap the model, and build its optimizer and scheduler unless `forward_only` is set."""
        module = self._build_module()
        if next(module.parameters()).is_meta:  # wrap_model broadcasts the values of the first rank
            module.to_empty(device="cpu")
        self.pass_packed_cu_seqlens = "cu_seqlens" in inspect.signature(module.forward).parameters
        if self.model_config.lora_rank > 0:
            module = self._build_lora_module(module)
        trains = not self.engine_config.forward_only
        self.module = zeroamp.wrap_model(module if trains else module.requires_grad_(False), self.policy)
        self._driver = LoopDriver(self.module, "forward_backward_batch.", reopens=True)
        self.optimizer: Any = build_optimizer(self.module.parameters(), self.optimizer_config) if trains else None
        self.lr_scheduler: Any = self._build_lr_scheduler(self.optimizer) if trains else None
        self._driver.add(filter(None, [self.optimizer]))
        self.to("cpu", self.is_param_offload_enabled, self.is_optimizer_offload_enabled, self.is_param_offload_enabled)

    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Any:
        return self._driver.accumulating(not is_last_micro_batch)

    def optimizer_zero_grad(self) -> None:
        """Discard the gradients."""
        self._driver.zero_grad(self.optimizer)

    def optimizer_step(self) -> float:
        """Clip the gradients, update the parameters unless the norm is not finite, and return the norm."""
        norm = self._driver.clip_norm(self.optimizer_config.clip_grad)
        self._driver.step(self.optimizer)
        return norm.item()

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """Return an iterator of published names and whole weights, adapters merged. All ranks iterate to the end."""
        self.to("device", optimizer=False, grad=False)  # verl moves them to the host again
        iterate = iter_merged_weights if self.model_config.lora_rank > 0 else zeroamp.iter_weights
        return iterate(self.module, self._weights_dtype), None

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move state to host memory if `device` is "cpu", else to the device. What is there already stays."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        grad = grad or (model and device != "cpu")  # a forward needs both awake, also if there are no gradients
        parts = {part for part, is_asked in zip(PARTS, (model, grad, optimizer), strict=True) if is_asked}
        if device == "cpu" and (moved := parts - self._asleep):
            zeroamp.sleep(self.module, self.optimizer or (), sorted(moved))
            self._asleep |= moved
        elif device != "cpu" and (moved := parts & self._asleep):
            zeroamp.wake(self.module, sorted(moved))
            self._asleep -= moved

    def save_checkpoint(
        self, local_path: str, hdfs_path: Any = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Save `local_path`/step_<global_step>, with the state of verl's scheduler."""
        if hdfs_path is not None:
            raise zeroamp.ConfigError(f"hdfs_path is {hdfs_path!r}, but must be left out: local_path is written.")
        with self.train_mode():
            extra = {"lr_scheduler": self.lr_scheduler.state_dict()}
            zeroamp.save_checkpoint(local_path, self.module, self._driver.train, step=global_step, extra=extra)
        if self.rank == 0:
            self._saved.register_checkpoint(local_path, max_ckpt_to_keep)

    def load_checkpoint(self, local_path: str, hdfs_path: Any = None, del_local_after_load: bool = False) -> None:
        """Load the newest checkpoint in `local_path`."""
        if hdfs_path is not None or del_local_after_load:
            raise zeroamp.ConfigError("hdfs_path and del_local_after_load must be left out: local_path is loaded.")
        with self.train_mode():
            extra: Any = zeroamp.load_checkpoint(local_path, self.module, self._driver.train)
            self.lr_scheduler.load_state_dict(extra["lr_scheduler"])


def _refuse(engine: ZeroampEngine, checkpoint: Any) -> None:
    """Raise ConfigError that names the keys without an effect: see [Note: Keys of verl]."""
    ours, model, optim, policy = engine.engine_config, engine.model_config, engine.optimizer_config, engine.policy
    by_verl = ("optimizer", "scheduler", "gradient_", "train_")  # `optim` and the batches of verl decide
    wrong = [f"engine.zeroamp.{path}: leave it out" for path, _ in policy.given if path.startswith(by_verl)]
    for of, config, keys in (  # keys that nothing here reads
        ("engine", ours, "use_fused_kernels router_replay seed full_determinism ulysses_sequence_parallel_size"),
        ("model", model, "use_liger use_fused_kernels enable_activation_offload tiled_mlp mtp"),
        ("checkpoint", checkpoint, "save_contents load_contents async_save strict save_lora_only mbridge_config"),
    ):
        for key in dataclasses.fields(config):
            default = key.default if key.default_factory is dataclasses.MISSING else key.default_factory()
            if key.name in keys.split() and getattr(config, key.name) != default:
                wrong.append(f"{of}.{key.name}: it must be {default!r}")
    low, rank = str(policy.low_dtype or torch.float32).removeprefix("torch."), model.lora_rank
    others = {
        "engine.zeroamp.zeroamp.reproducible: leave it out": policy.reproducible,
        f"engine.zeroamp.{policy.mode}: write torch_autocast": policy.mode not in ("autocast", "fp32"),
        f"engine.dtype: it must be null or {low}, as in engine.zeroamp": ours.dtype not in (None, low),
        f"model.lora.merge: it must be {rank > 0}": model.lora.get("merge", False) != (rank > 0),
        "model.lora.rank: write model.lora_rank": model.lora.get("rank"),
        "model.lora_adapter_path: it needs model.lora_rank": model.lora_adapter_path is not None and rank == 0,
        "engine.use_remove_padding: it must be as in model": ours.use_remove_padding != model.use_remove_padding,
        "engine.pad_to_length: it needs use_remove_padding": ours.pad_to_length and not model.use_remove_padding,
        "optim: it must be an FSDPOptimizerConfig": not (ours.forward_only or type(optim) is FSDPOptimizerConfig),
        "optim.clip_grad: it must be above 0": not (ours.forward_only or (optim.clip_grad or 0) > 0),
    }
    if wrong := wrong + [text for text, is_wrong in others.items() if is_wrong]:
        raise zeroamp.ConfigError("The zeroamp engine of verl does not do what these keys ask for. " + ". ".join(wrong))

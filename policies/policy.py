"""`Policy`: what a config asks for, as frozen values. Nothing here knows a model or a process group."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from zeroamp.policies.loss_scale import NO_LOSS_SCALE, LossScale
from zeroamp.policies.render import render_report, to_config
from zeroamp.policies.schema.instruments import FileMonitorBlock, WandbBlock
from zeroamp.policies.schema.optimizer import OptimizerBlock
from zeroamp.policies.schema.scheduler import SchedulerBlock

Mode = Literal["autocast", "bf16", "fp16", "fp32"]
Stage = Literal[0, 1, 2, 3]
ReduceAccumulate = Literal["fp32", "native"]
ExternalAutocast = Literal["error", "allow"]
RangeMode = Literal["profiler", "nvtx", "off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """Where the sharded parameters, their gradients and the optimizer state live: FSDP2 moves all three together."""

    to_cpu: bool = False
    """Gathered copies stay on the accelerator; only shards move."""

    pin_memory: bool = True
    """Page-locked memory, which copies overlap with compute. Only where there is an accelerator."""


NO_OFFLOAD = Offload()


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafModules:
    """Modules that are gathered whole, as one unit: sparse experts, of which a forward runs only some."""

    classes: tuple[str, ...] = ()
    """Class names, bare or "package.module.Class"; subclasses count."""
    names: tuple[str, ...] = ()
    """FQNs."""
    name_suffixes: tuple[str, ...] = ()
    """Ends of FQNs, at a dot: "mlp" is the end of "layers.0.mlp"."""


NO_LEAF_MODULES = LeafModules()


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Precision, sharding stage and step of one training run, from `policy_from_config`.

    Change a field with `dataclasses.replace`. `str(policy)` is JSON, of a config that `policy_from_config` turns into
    an equal policy.
    """

    mode: Mode = "fp32"
    """"autocast": per-op precision of `torch.autocast`, safe parameters gathered low. "bf16", "fp16": every parameter
    gathered and computed in that dtype. "fp32": no mixed precision. Storage and optimizer state are fp32 in all."""

    low_dtype: torch.dtype | None = None
    """The low precision of the mode: bfloat16 or float16; None for mode "fp32"."""

    lower_precision_safe_modules: tuple[str, ...] | Literal["auto"] = ()
    """Class names whose parameters are safe; "auto" finds out by a traced run, see `discover_safe_parameters`. Only
    mode "autocast" reads it."""

    stage: Stage = 0
    """ZeRO stage: 0 replicates; 1 shards optimizer state; 2 also gradients; 3 also parameters."""

    communication_data_type: torch.dtype | None = None
    """Dtype on the wire of the gradient reduction of low-precision parameters (of all parameters in mode "fp32"). None
    means the dtype their raw gradients have, which loses nothing. Under autocast, unsafe parameters always reduce in
    fp32."""

    reduce_accumulate_dtype: ReduceAccumulate = "fp32"
    """How a low-precision wire is summed: "fp32" sends low precision and sums in fp32 in rank order; "native" uses the
    backend's own reduction in the wire dtype. No effect on a wire of fp32."""

    grad_accum_dtype: torch.dtype = torch.float32
    """Dtype in which the gradients of several micro-batches are summed: unsharded at stages 0 and 1, sharded at stages
    2 and 3. No effect with one micro-batch per step."""

    external_autocast: ExternalAutocast = "error"
    """What a forward inside the caller's own `torch.autocast` is, where the mode is not "autocast": an error, or let
    through."""

    loss_scale: LossScale = NO_LOSS_SCALE
    """Only float16 scales the loss."""

    count_traffic: bool = True
    """Whether collectives are counted (calls and bytes). Results are the same bits either way."""

    ranges: RangeMode = "profiler"
    """When the work on each unit and group is named for a trace. "profiler": while a torch profiler records. "nvtx": as
    NVTX ranges always, and for a torch profiler too. Results are the same bits in every mode."""

    recovery: bool = True
    """Whether an exception on one rank is raised on all of them, and `TrainStep.recover` goes on after it. Off, `step`
    does not wait for the device, and the other ranks wait for the timeout of the process group."""

    share_casts: bool = True
    """Under autocast: whether Linears of a unit that read the same tensor share its low-precision copy, where autocast
    makes one for each. Results are the same bits either way."""

    reduce_scatter_input_buffers: int = 1
    """Flat inputs of reductions that may be in flight, from torch 2.13 on. With 1, FSDP2's default, a unit's backward
    waits for the reduction before it; more cost the memory of one input each."""

    separate_reduce_scatter_group: bool = False
    """Whether reductions run in a process group of their own, beside the gathers, from torch 2.13 on. In one NCCL
    communicator one runs after the other. Results are the same bits either way."""

    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step and rank."""

    gradient_clipping: float = 0.0
    """Largest global gradient 2-norm; gradients are scaled down to it. 0 (the default) does not clip."""

    param_persistence_threshold: int = 100_000
    """Elements. fp32 parameters smaller than this, in units whose main group is low precision, are gathered once per
    step in one model-wide group, and with them the root's own, whatever their size. DeepSpeed's
    `stage3_param_persistence_threshold`, here at every stage."""

    train_batch_size: int | None = None
    """Samples per optimizer step over all ranks. None: not said."""

    train_micro_batch_size_per_gpu: int | None = None
    """Samples per micro-batch and rank, for the data loader. None: not said."""

    keep_in_fp32_modules: tuple[str, ...] | Literal["auto"] = "auto"
    """Patterns of modules, parameters and buffers that are gathered, computed and kept in fp32 in every mode; see
    `zeroamp.planning.fp32_regions`. "auto": what transformers models say of themselves."""

    buffer_dtype: torch.dtype | None = None
    """What floating-point buffers are cast to when the model is wrapped. None: they stay as they are."""

    check_grad_overflow: bool = False
    """Whether a step with a non-finite gradient is skipped without float16 too (which always skips it)."""

    hpz_partition_size: int = 1
    """Stage 3: ranks that a parameter is sharded over between forward and backward; must divide the ranks. 1 keeps the
    sharding over all of them. DeepSpeed's `zero_hpz_partition_size`."""

    dp_replicate_size: int = 1
    """HSDP: replicas that each shard the model over the ranks they have. Only where `wrap_model` makes the mesh."""

    max_live_parameters: int = 0
    """Stage 3: elements that may stay gathered from forward to backward; the last units of the forward do, as long as
    they fit under it together. DeepSpeed's `stage3_max_live_parameters`."""

    prefetch_bucket_size: int = 0
    """Stage 3: elements to gather ahead: each unit starts the gathers of those after it as long as they fit under it
    together. 0 leaves it to FSDP2 (one unit ahead in backward). DeepSpeed's `stage3_prefetch_bucket_size`."""

    reduce_bucket_size: int = 0
    """Elements: neighbouring units are merged, that is gathered and reduced as one, as long as they fit under it
    together. 0 merges none."""

    leaf_modules: LeafModules = NO_LEAF_MODULES
    """Modules that become units, with no unit inside."""

    offload: Offload = NO_OFFLOAD
    """Whether shards live on the CPU."""

    gather_16bit_weights_on_save: bool = False
    """Whether `zeroamp.export_hf` writes the low dtype where its caller names none, instead of fp32. DeepSpeed's
    `stage3_gather_16bit_weights_on_model_save`, here at every stage."""

    steps_per_print: int = 0
    """Optimizer steps between two log lines of `TrainStep` (logger "zeroamp", level INFO, first rank). 0: none."""

    wall_clock_breakdown: bool = False
    """Whether `TrainStep` logs where the time of a step went, every `steps_per_print` steps, or every 10."""

    tensorboard: FileMonitorBlock | None = None
    """Where `TrainStep` writes TensorBoard's event files. None: nowhere; so for the next two."""

    csv_monitor: FileMonitorBlock | None = None
    """Where it writes steps.csv."""

    wandb: WandbBlock | None = None
    """The run of Weights & Biases that it logs to."""

    optimizer: OptimizerBlock | None = None
    """What `optimizer_from_config` builds. None: not said."""

    scheduler: SchedulerBlock | None = None
    """What `scheduler_from_config` builds. None: not said."""

    given: tuple[tuple[str, Any], ...] = field(default=(), compare=False, repr=False)
    """The keys of the config this came from, with dots, and their values. For `report`; policies compare without."""

    def __str__(self) -> str:
        """Return the config as JSON, defaults written out."""
        return json.dumps(self.to_config(), indent=2)

    def to_config(self) -> dict[str, Any]:
        """Return the config, defaults written out, from which `policy_from_config` makes an equal policy."""
        return to_config(self)

    def report(self) -> str:
        """Return a table of what became of each key: honoured, native, off, no effect, or a default."""
        return render_report(self)

    @property
    def gather_dtype(self) -> torch.dtype:
        """Dtype in which low-precision parameters are gathered (fp32 in mode "fp32")."""
        return self.low_dtype or torch.float32

    @property
    def export_dtype(self) -> torch.dtype:
        """Dtype in which `zeroamp.export_hf` writes parameters where its caller names none."""
        return self.gather_dtype if self.gather_16bit_weights_on_save else torch.float32

    @property
    def wire_dtype(self) -> torch.dtype:
        """Dtype in which the gradients of low-precision parameters are sent at stages 1 to 3."""
        return self.communication_data_type or self.gather_dtype

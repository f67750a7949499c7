"""The top level of the config."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from zeroamp.policies.errors import shown
from zeroamp.policies.schema.instruments import (
    ActivationCheckpointingBlock,
    CheckpointBlock,
    CometBlock,
    CommsLoggerBlock,
    FileMonitorBlock,
    FlopsProfilerBlock,
    TimersBlock,
    WandbBlock,
)
from zeroamp.policies.schema.keys import (
    Block,
    Count,
    Dtype,
    Honoured,
    Native,
    Number,
    PositiveInt,
    Steps,
    Unsupported,
    as_tuple,
    refused,
)
from zeroamp.policies.schema.optimizer import OptimizerBlock
from zeroamp.policies.schema.precision import Bf16Block, DataTypesBlock, Fp16Block, OverrideBlock, TorchAutocastBlock
from zeroamp.policies.schema.scheduler import SchedulerBlock
from zeroamp.policies.schema.zero import ZeroOptimizationBlock

_SUMS_IN_FP32 = "Remove it: gradients are summed in fp32 and divided after, so that nothing over- or underflows before."
_NO_SUCH_FEATURE = "Remove it: zeroamp has no such feature, and would otherwise ignore the block."
_GONE = "Remove it: DeepSpeed 0.19.8 has removed it too."


def _no_deepcompile(block: object) -> object:
    if isinstance(block, dict) and block.get("deepcompile", False) is not False:
        raise refused(
            f"must not have deepcompile {shown(block['deepcompile'])}: there is no DeepCompile. Call torch.compile on "
            "the model's blocks before wrap_model."
        )
    return block


def _auto_or_zero(value: object) -> object:
    # A Literal compares with ==, for which False is 0.
    if type(value) not in (str, int):
        raise ValueError('"auto" or 0')
    return value


RangeMode = Literal["profiler", "nvtx", "off"]


class ZeroampBlock(Block):
    """`zeroamp`: the keys that DeepSpeed does not have."""

    reduce_accumulate_dtype: Annotated[
        Literal["fp32", "native"],
        Honoured(
            "how gradients are summed over ranks: `fp32` in the order of one balanced tree, after low-precision ones "
            "were sent low; `native` by the backend, in the communication dtype"
        ),
    ] = "fp32"
    param_gather_dtype: Annotated[
        Literal["float8_e4m3fn"] | None,
        Honoured(
            "the weights of Linears that would be all-gathered in bf16 are rounded to this dtype, with one scale per "
            "weight, and are all-gathered and unsharded in it; the Linears compute in bf16. Needs torchao. See "
            "docs/float8.md"
        ),
    ] = None
    overrides: Annotated[
        tuple[OverrideBlock, ...],
        BeforeValidator(as_tuple),
        Honoured(
            "other dtypes for some modules, as objects of the keys below; of the objects that match a parameter the "
            "first one counts, before every list of classes"
        ),
    ] = ()
    external_autocast: Annotated[
        Literal["error", "allow"],
        Honoured("a forward inside your own `torch.autocast`, where `torch_autocast` is off: an error, or allowed"),
    ] = "error"
    dp_replicate_size: Annotated[
        PositiveInt, Honoured("HSDP: replicas, each sharded over its part of the ranks, where no mesh is passed")
    ] = 1
    ranks_per_node: Annotated[
        Literal["auto", "off"] | PositiveInt,
        Honoured(
            "ranks of one node: reductions and gathers over several nodes then run in two levels, with the same bits. "
            "`auto`: the launcher's `LOCAL_WORLD_SIZE`; `off` or 1: flat (docs/precision.md)"
        ),
    ] = "auto"
    partials_between_nodes: Annotated[
        Literal["fp32", "3 bytes", "bf16"],
        Honoured(
            "how sums of one node are sent to the others: `fp32` changes no bit; `3 bytes` rounds each to 2^-16, "
            "`bf16` to 2^-8, for fewer bytes"
        ),
    ] = "fp32"
    sync_module_states: Annotated[
        bool,
        Honoured(
            "`wrap_model` broadcasts the first rank's parameters and buffers. Off, parameters that differ between "
            "ranks are an error"
        ),
    ] = False
    count_traffic: Annotated[
        bool | None,
        Honoured("count calls and bytes of every collective (`zeroamp.traffic(model)`). Default: true; same results"),
    ] = None
    ranges: Annotated[
        RangeMode,
        Honoured("names in traces: `profiler` while a torch profiler records, `nvtx` always, also as NVTX, or `off`"),
    ] = "profiler"
    reduce: Annotated[
        Literal["mean", "sum"],
        Honoured(
            "whether gradients are averaged or summed over ranks; `sum` for a loss that is normalised over all ranks"
        ),
    ] = "mean"
    skip_nonfinite_steps: Annotated[
        bool,
        Honoured(
            "in every mode, skip the steps whose gradient norm is inf or nan, as float16 always does. The host then "
            "reads the norm in each step: with fused optimizers after it launched the update, else before the update"
        ),
    ] = False
    reproducible: Annotated[
        bool,
        Honoured(
            "losses, norms and weights have the same bits on any number of ranks, a power of two, if the global batch "
            "is the same: see docs/reproducible.md. Off, nothing of it runs"
        ),
    ] = False
    seed: Annotated[
        Count | None,
        Honoured(
            "with `reproducible`: the seed of the random numbers in forwards, such as dropout. Each micro-batch draws "
            "from a generator that this seed, the step and the place of the micro-batch in the step decide. Default: 0"
        ),
    ] = None
    shard_dim: Annotated[
        Literal["auto", 0],
        BeforeValidator(_auto_or_zero),
        Honoured(
            "the dimension over which a parameter is sharded: `auto` chooses another dimension than 0 where this saves "
            "at least 1 % of padding (docs/precision.md); `0` is always dimension 0"
        ),
    ] = "auto"
    recovery: Annotated[
        bool,
        Honoured(
            "whether an exception on one rank is raised on all of them, and `TrainStep.recover` goes on after it. Off, "
            "nothing of it runs"
        ),
    ] = False
    autocast_ops: Annotated[
        tuple[Literal["grouped_mm"], ...],
        BeforeValidator(as_tuple),
        Honoured(
            "ops without a rule in autocast that the hook's autocast casts too: `grouped_mm` (`torch._grouped_mm`, "
            "fused MoE experts). Parameters that only they read are then all-gathered and reduced in `dtype`, see "
            "docs/moe.md"
        ),
    ] = ()
    share_casts: Annotated[
        bool,
        Honoured("under autocast, Linears of a unit that read the same tensor share its low-precision copy; same bits"),
    ] = True
    own_units: Annotated[
        bool,
        Honoured(
            "at stage 3, large embeddings and output heads outside of all units are units of their own. Off, they stay "
            "unsharded with the root; same bits"
        ),
    ] = True
    reduce_scatter_input_buffers: Annotated[
        PositiveInt,
        Honoured(
            "flat inputs of reductions that may be in flight, torch 2.13+. With 1 a unit's backward "
            "waits for the reduction before it; each more costs the memory of one input"
        ),
    ] = 1
    separate_reduce_scatter_group: Annotated[
        bool | None,
        Honoured(
            "reductions have a process group of their own, torch 2.13+: beside all-gathers, not after them, as in one "
            "NCCL communicator; same bits. Default: true where nodes do not allow two levels, unless "
            "`zeroamp.recovery` is on"
        ),
    ] = None
    symmetric_memory: Annotated[
        bool,
        Honoured(
            "all-gathers write to memory that GPUs share over NVLink, as with FSDP2's `set_symm_mem_for_comm`; same "
            "bits. Needs torch 2.13, NCCL, and all-gathers in one level. See docs/precision.md"
        ),
    ] = False


class Config(Block):
    """All keys. The keys of a block that is not enabled are checked and have no effect."""

    train_batch_size: Annotated[
        PositiveInt | None, Honoured("samples per step: micro-batch size x accumulation steps x ranks, checked")
    ] = None
    train_micro_batch_size_per_gpu: Annotated[PositiveInt | None, Honoured("samples per micro-batch and rank")] = None
    gradient_accumulation_steps: Annotated[
        PositiveInt | None, Honoured("micro-batches per optimizer step and rank. Default: from the batch sizes, else 1")
    ] = None
    gradient_clipping: Annotated[
        Number,
        Field(ge=0),
        Honoured("largest global 2-norm of the gradient, which is scaled down to it; 0 is off", 1.0),
    ] = 0.0
    torch_autocast: TorchAutocastBlock = TorchAutocastBlock()
    bf16: Bf16Block = Bf16Block()
    fp16: Fp16Block = Fp16Block()
    data_types: DataTypesBlock = DataTypesBlock()
    gradient_accumulation_dtype: Annotated[
        Dtype | None, Honoured("the same as data_types.grad_accum_dtype; both must agree")
    ] = None
    communication_data_type: Annotated[
        Dtype | None,
        Honoured(
            "communication dtype of low-precision gradients (of all in mode fp32). Default: the "
            "dtype of the raw gradients. Under autocast, unsafe parameters always reduce in fp32"
        ),
    ] = None
    zero_optimization: ZeroOptimizationBlock = ZeroOptimizationBlock()
    zeroamp: ZeroampBlock = ZeroampBlock()
    optimizer: OptimizerBlock | None = None
    scheduler: SchedulerBlock | None = None
    steps_per_print: Annotated[
        Steps | None,
        Honoured(
            "optimizer steps between two log lines of `TrainStep` (logger zeroamp, INFO, first rank); 0 and infinity: "
            "none. Default: none",
            10,
        ),
    ] = None
    wall_clock_breakdown: Annotated[
        bool, Honoured("log where the time of a step went, every `steps_per_print` steps, or every 10")
    ] = False
    comms_logger: CommsLoggerBlock = CommsLoggerBlock()
    tensorboard: FileMonitorBlock = FileMonitorBlock()
    csv_monitor: FileMonitorBlock = FileMonitorBlock()
    wandb: WandbBlock = WandbBlock()

    activation_checkpointing: ActivationCheckpointingBlock = ActivationCheckpointingBlock()
    checkpoint: CheckpointBlock = CheckpointBlock()
    timers: TimersBlock = TimersBlock()
    comet: CometBlock = CometBlock()
    flops_profiler: FlopsProfilerBlock = FlopsProfilerBlock()

    zero_allow_untested_optimizer: Annotated[bool, Native("any torch optimizer works")] = False
    zero_force_ds_cpu_optimizer: Annotated[bool, Native("the optimizer is always torch's")] = True
    use_data_before_expert_parallelism: Annotated[bool, Native("there is no expert parallelism")] = False
    log_level: Annotated[str | None, Native('set it with logging.getLogger("zeroamp")')] = None
    vocabulary_size: Annotated[Count | None, Native("DeepSpeed only warns where it does not divide")] = None
    aio: Annotated[object, Native("only NVMe offload reads it, which is refused by its device")] = None
    compile: Annotated[
        object,
        AfterValidator(_no_deepcompile),
        Native("compiles nothing in DeepSpeed either, but for `deepcompile`, which is refused; use torch.compile"),
    ] = None
    comms_config: Annotated[object, Native("DeepSpeed reads comms_logger, not this key of LLaMA-Factory")] = None
    monitor_config: Annotated[
        object, Native("DeepSpeed reads tensorboard, csv_monitor and wandb, not this key of LLaMA-Factory")
    ] = None

    memory_breakdown: Annotated[bool, Unsupported("Use torch.cuda.memory_summary() or its snapshot.")] = False
    dump_state: Annotated[bool, Unsupported("Print policy.report() and zeroamp.explain(model).")] = False
    prescale_gradients: Annotated[bool, Unsupported(_SUMS_IN_FP32)] = False
    gradient_predivide_factor: Annotated[Number, Unsupported(_SUMS_IN_FP32, (1.0,))] = 1.0
    gradient_allreduce_op: Annotated[
        Literal["mean", "sum"], Unsupported('Write "zeroamp": {"reduce": "sum"}.', ("mean",))
    ] = "mean"
    seq_parallel_communication_data_type: Annotated[
        object, Unsupported("Remove it: there is no sequence parallelism.", (None, "fp32", "float32"))
    ] = None
    managed_gradient_accumulation: Annotated[
        bool, Unsupported("Remove it: TrainStep counts the micro-batches; or write a plain loop.", (True,))
    ] = True
    disable_allgather: Annotated[bool, Unsupported("Remove it: parameters must be all-gathered.")] = False
    disable_python_gc: Annotated[bool, Unsupported("Call gc.disable() yourself.")] = False
    dataloader_drop_last: Annotated[bool, Unsupported("Give it to your DataLoader: zeroamp has none.")] = False

    amp: Annotated[object, Unsupported("Write torch_autocast: it is what replaced Apex AMP.")] = None
    autotuning: Annotated[object, Unsupported(_NO_SUCH_FEATURE)] = None
    bfloat16: Annotated[object, Unsupported("Write bf16.")] = None
    compression_training: Annotated[object, Unsupported(_GONE)] = None
    curriculum_learning: Annotated[object, Unsupported(_GONE)] = None
    data_efficiency: Annotated[object, Unsupported(_NO_SUCH_FEATURE)] = None
    datastates_ckpt: Annotated[object, Unsupported(_NO_SUCH_FEATURE)] = None
    eigenvalue: Annotated[object, Unsupported(_GONE)] = None
    elasticity: Annotated[object, Unsupported(_GONE)] = None
    expert_parallel: Annotated[object, Unsupported(_NO_SUCH_FEATURE)] = None
    fp32_allreduce: Annotated[object, Unsupported('Write "communication_data_type": "fp32".')] = None
    graph_harvesting: Annotated[object, Unsupported(_GONE)] = None
    hybrid_engine: Annotated[object, Unsupported(_NO_SUCH_FEATURE)] = None
    nebula: Annotated[object, Unsupported(_GONE)] = None
    pipeline: Annotated[object, Unsupported(_NO_SUCH_FEATURE)] = None
    progressive_layer_drop: Annotated[object, Unsupported(_GONE)] = None
    quantize_training: Annotated[object, Unsupported(_GONE)] = None
    sequence_parallel_size: Annotated[object, Unsupported(_NO_SUCH_FEATURE, (None, 1))] = None
    sparse_attention: Annotated[object, Unsupported(_GONE)] = None
    sparse_gradients: Annotated[object, Unsupported(_GONE)] = None
    tensor_parallel: Annotated[object, Unsupported(_NO_SUCH_FEATURE)] = None
    weight_quantization: Annotated[object, Unsupported(_NO_SUCH_FEATURE)] = None

"""The blocks that log, measure and save: monitors, profilers, checkpoints."""

from typing import Annotated, Literal

from zeroamp.policies.schema.keys import Block, Count, Honoured, Names, Native, Number, PositiveInt, Unsupported

_NO_COMET = "Use tensorboard, csv_monitor or wandb, or add a zeroamp.Callback to TrainStep.callbacks."
_OF_COMET = "it is read only if comet is enabled, which is an error"
_OF_THE_PROFILER = "it is read only if flops_profiler is enabled, which is an error"
_MODEL_CHECKPOINTS = (
    "Remove it, and call the model's gradient_checkpointing_enable(), or wrap blocks with torch's checkpoint_wrapper."
)
_JOB = "zeroamp"

Text = Annotated[str | None, Native(_OF_COMET)]


class FileMonitorBlock(Block):
    """`tensorboard` and `csv_monitor`: files to which the first rank writes each optimizer step."""

    enabled: Annotated[bool, Honoured("the first rank writes each step, see docs/instruments.md")] = False
    output_path: Annotated[str, Honoured("folder. Default: the current one")] = ""
    job_name: Annotated[str, Honoured("folder inside `output_path`", "DeepSpeedJobName")] = _JOB


class WandbBlock(Block):
    """`wandb`: the Weights & Biases run to which the first rank logs each optimizer step."""

    enabled: Annotated[bool, Honoured("the first rank logs each step, see docs/instruments.md")] = False
    group: Annotated[str | None, Honoured("wandb's group of runs")] = None
    team: Annotated[str | None, Honoured("wandb's entity")] = None
    project: Annotated[str, Honoured("wandb's project", "deepspeed")] = _JOB


class CometBlock(Block):
    """`comet`: an error if enabled."""

    enabled: Annotated[bool, Unsupported(_NO_COMET)] = False
    samples_log_interval: Annotated[Count, Native(_OF_COMET)] = 100
    project: Text = None
    workspace: Text = None
    api_key: Text = None
    experiment_name: Text = None
    experiment_key: Text = None
    online: Annotated[bool | None, Native(_OF_COMET)] = None
    mode: Text = None


class CommsLoggerBlock(Block):
    """`comms_logger`: counters of calls and bytes of the collectives."""

    enabled: Annotated[
        bool | None,
        Honoured("count calls and bytes of all collectives: `zeroamp.traffic(model)`. Default: true", False),
    ] = None
    verbose: Annotated[bool, Unsupported("Print zeroamp.traffic(model).by_dtype() instead.")] = False
    debug: Annotated[bool, Unsupported("Use torch.profiler: its trace names every collective.")] = False
    prof_all: Annotated[bool, Native("all collectives are counted")] = True
    prof_ops: Annotated[Names, Native("all collectives are counted")] = ()


class FlopsProfilerBlock(Block):
    """`flops_profiler`: an error if enabled. `zeroamp.count_flops` counts FLOPs."""

    enabled: Annotated[
        bool, Unsupported("Use zeroamp.count_flops(model, batch) before wrap_model, and RunReport(flops_per_step=).")
    ] = False
    recompute_fwd_factor: Annotated[Number, Native(_OF_THE_PROFILER)] = 0.0
    profile_step: Annotated[Count, Native(_OF_THE_PROFILER)] = 1
    module_depth: Annotated[int, Native(_OF_THE_PROFILER)] = -1
    top_modules: Annotated[Count, Native(_OF_THE_PROFILER)] = 1
    detailed: Annotated[bool, Native(_OF_THE_PROFILER)] = True
    output_file: Annotated[str | None, Native(_OF_THE_PROFILER)] = None


class ActivationCheckpointingBlock(Block):
    """`activation_checkpointing`. In DeepSpeed too, the model itself chooses the activations that it recomputes."""

    partition_activations: Annotated[bool, Unsupported(_MODEL_CHECKPOINTS)] = False
    cpu_checkpointing: Annotated[bool, Unsupported("Use torch.autograd.graph.save_on_cpu around the forward.")] = False
    contiguous_memory_optimization: Annotated[bool, Unsupported(_MODEL_CHECKPOINTS)] = False
    synchronize_checkpoint_boundary: Annotated[bool, Unsupported("Remove it: it is not needed.")] = False
    profile: Annotated[bool, Unsupported("Use torch.profiler.")] = False
    number_checkpoints: Annotated[
        PositiveInt | None, Native("it is read only with contiguous_memory_optimization, which is an error")
    ] = None


class ParallelWriteBlock(Block):
    """`checkpoint.parallel_write`, without effect: all ranks write their own shards."""

    pipeline_stage: Annotated[bool, Native("every rank writes its own shards")] = False


class CheckpointBlock(Block):
    """`checkpoint`: options of DeepSpeed's checkpoints, without effect or not supported."""

    tag_validation: Annotated[
        Literal["Ignore", "Warn", "Fail", "IGNORE", "WARN", "FAIL", "ignore", "warn", "fail"],
        Native("one rank chooses the name of the folder for all"),
    ] = "Warn"
    load_universal: Annotated[bool, Native("load_checkpoint loads on any number of ranks and at any stage")] = False
    use_node_local_storage: Annotated[bool, Unsupported("Save to a folder that all ranks can read.")] = False
    writer: Annotated[object, Unsupported("Remove it: torch.distributed.checkpoint has its own writers.")] = None
    checkpoint_serialization: Annotated[bool, Native("torch.distributed.checkpoint has one format")] = True
    parallel_write: ParallelWriteBlock = ParallelWriteBlock()


class TimersThroughputBlock(Block):
    """`timers.throughput`, without effect: see `RunReport`."""

    enabled: Annotated[bool, Native("a RunReport has tokens/s, without waiting for the device")] = True
    synchronized: Annotated[bool, Native("a RunReport has tokens/s, without waiting for the device")] = True


class TimersBlock(Block):
    """`timers`, without effect: see `RunReport`."""

    throughput: TimersThroughputBlock = TimersThroughputBlock()

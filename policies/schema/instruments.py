"""The blocks that log, measure and save: monitors, profilers, checkpoints."""

from typing import Annotated, Literal

from pydantic import Field

from zeroamp.policies.schema.keys import Block, Count, Honoured, Native, Number, Unsupported
from zeroamp.policies.schema.precision import Names

_NO_MONITOR = "Log the StepReport that TrainStep.step() returns; it has loss, norm, loss scale and skipped steps."
_OF_A_MONITOR = "only an enabled monitor reads it, which is refused"
_OF_THE_PROFILER = "only an enabled flops_profiler reads it, which is refused"
_MODEL_CHECKPOINTS = (
    "Remove it: the model chooses what it recomputes, by gradient_checkpointing_enable() or torch's checkpoint_wrapper."
)

Text = Annotated[str | None, Native(_OF_A_MONITOR)]


class FileMonitorBlock(Block):
    """`tensorboard`, `csv_monitor`."""

    enabled: Annotated[bool, Unsupported(_NO_MONITOR)] = False
    output_path: Text = ""
    job_name: Text = "DeepSpeedJobName"


class WandbBlock(Block):
    """`wandb`."""

    enabled: Annotated[bool, Unsupported(_NO_MONITOR)] = False
    group: Text = None
    team: Text = None
    project: Text = "deepspeed"


class CometBlock(Block):
    """`comet`."""

    enabled: Annotated[bool, Unsupported(_NO_MONITOR)] = False
    samples_log_interval: Annotated[Count, Native(_OF_A_MONITOR)] = 100
    project: Text = None
    workspace: Text = None
    api_key: Text = None
    experiment_name: Text = None
    experiment_key: Text = None
    online: Annotated[bool | None, Native(_OF_A_MONITOR)] = None
    mode: Text = None


class CommsLoggerBlock(Block):
    """`comms_logger`."""

    enabled: Annotated[
        bool | None,
        Honoured("count calls and bytes of every collective: `zeroamp.traffic(model)`. Default: count", False),
    ] = None
    verbose: Annotated[bool, Unsupported("Print zeroamp.traffic(model).by_dtype() when you want it.")] = False
    debug: Annotated[bool, Unsupported("Use torch.profiler: its trace names every collective.")] = False
    prof_all: Annotated[bool, Native("all collectives are counted")] = True
    prof_ops: Annotated[Names, Native("all collectives are counted")] = ()


class FlopsProfilerBlock(Block):
    """`flops_profiler`."""

    enabled: Annotated[
        bool, Unsupported("Use torch.utils.flop_counter.FlopCounterMode on one step, outside training.")
    ] = False
    recompute_fwd_factor: Annotated[Number, Native(_OF_THE_PROFILER)] = 0.0
    profile_step: Annotated[Count, Native(_OF_THE_PROFILER)] = 1
    module_depth: Annotated[int, Native(_OF_THE_PROFILER)] = -1
    top_modules: Annotated[Count, Native(_OF_THE_PROFILER)] = 1
    detailed: Annotated[bool, Native(_OF_THE_PROFILER)] = True
    output_file: Annotated[str | None, Native(_OF_THE_PROFILER)] = None


class ActivationCheckpointingBlock(Block):
    """`activation_checkpointing`: in DeepSpeed, too, the model itself chooses what it recomputes."""

    partition_activations: Annotated[bool, Unsupported(_MODEL_CHECKPOINTS)] = False
    cpu_checkpointing: Annotated[bool, Unsupported("Use torch.autograd.graph.save_on_cpu around the forward.")] = False
    contiguous_memory_optimization: Annotated[bool, Unsupported(_MODEL_CHECKPOINTS)] = False
    synchronize_checkpoint_boundary: Annotated[bool, Unsupported("Remove it: nothing needs it.")] = False
    profile: Annotated[bool, Unsupported("Use torch.profiler.")] = False
    number_checkpoints: Annotated[
        Annotated[int, Field(ge=1)] | None, Native("only contiguous_memory_optimization reads it, which is refused")
    ] = None


class ParallelWriteBlock(Block):
    """`checkpoint.parallel_write`."""

    pipeline_stage: Annotated[bool, Native("every rank writes its own shards")] = False


class CheckpointBlock(Block):
    """`checkpoint`."""

    tag_validation: Annotated[
        Literal["Ignore", "Warn", "Fail", "IGNORE", "WARN", "FAIL", "ignore", "warn", "fail"],
        Native("save_checkpoint names the folder once, on one rank"),
    ] = "Warn"
    load_universal: Annotated[bool, Native("load_checkpoint takes any number of ranks and any stage")] = False
    use_node_local_storage: Annotated[bool, Unsupported("Save to a folder that all ranks see.")] = False
    writer: Annotated[object, Unsupported("Remove it: torch.distributed.checkpoint has its own writers.")] = None
    checkpoint_serialization: Annotated[bool, Native("torch.distributed.checkpoint has one format")] = True
    parallel_write: ParallelWriteBlock = ParallelWriteBlock()


class TimersThroughputBlock(Block):
    """`timers.throughput`."""

    enabled: Annotated[bool, Native("there are no timers in the step")] = True
    synchronized: Annotated[bool, Native("there are no timers in the step")] = True


class TimersBlock(Block):
    """`timers`."""

    throughput: TimersThroughputBlock = TimersThroughputBlock()

"""`zero_optimization`: the ZeRO stage, sizes of units and groups, prefetching and offload."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zeroamp.policies.schema.keys import (
    Block,
    Count,
    Elements,
    Honoured,
    Names,
    Native,
    Number,
    PositiveInt,
    Unsupported,
)

_NVME_ONLY = "it is read only with device nvme, which is an error"
_QUANTIZED = "Remove it: there is no quantized communication. Safe parameters are all-gathered and reduced in 16 bits."


def _only_int(value: object) -> object:
    # A Literal compares with ==, and True == 1 and 2.0 == 2.
    if type(value) is not int:
        raise ValueError("0, 1, 2 or 3")
    return value


Stage = Literal[0, 1, 2, 3]
Device = Literal["none", "cpu"]
Fraction = Annotated[Number, Field(ge=0, le=1)]


class OffloadParamBlock(Block):
    """`offload_param`: offload of the shards to the CPU, at stage 3 only."""

    device: Annotated[Device, Honoured("`cpu`: shards, gradients and optimizer state are on the CPU. Stage 3")] = "none"
    pin_memory: Annotated[bool, Honoured("page-locked memory, if there is an accelerator")] = True
    nvme_path: Annotated[str | None, Native(_NVME_ONLY)] = None
    buffer_count: Annotated[Count, Native(_NVME_ONLY)] = 5
    buffer_size: Annotated[Elements, Native(_NVME_ONLY)] = 100_000_000
    max_in_cpu: Annotated[Elements, Native(_NVME_ONLY)] = 1_000_000_000


class OffloadOptimizerBlock(Block):
    """`offload_optimizer`: offload of the shards to the CPU, at every stage."""

    device: Annotated[Device, Honoured("`cpu`: shards, gradients and optimizer state are on the CPU")] = "none"
    pin_memory: Annotated[bool, Honoured("page-locked memory, if there is an accelerator")] = True
    nvme_path: Annotated[str | None, Native(_NVME_ONLY)] = None
    buffer_count: Annotated[Count, Native(_NVME_ONLY)] = 4
    pipeline_read: Annotated[bool, Native(_NVME_ONLY)] = False
    pipeline_write: Annotated[bool, Native(_NVME_ONLY)] = False
    fast_init: Annotated[bool, Native(_NVME_ONLY)] = False
    ratio: Annotated[
        Fraction, Unsupported("Remove it: FSDP2 offloads all of the optimizer state or none of it.", (1.0,))
    ] = 1.0
    super_offload: Annotated[bool, Unsupported("Remove it: torch's optimizer updates on the CPU.")] = False
    cpuadam_cores_perc: Annotated[
        Fraction, Native("the optimizer is torch's: OMP_NUM_THREADS sets the number of its threads")
    ] = 0.8


class LeafModuleBlock(Block):
    """`leaf_module`: modules that are one unit each, such as sparse experts, of which a forward runs only some."""

    classes: Annotated[
        Names,
        Honoured(
            "classes of modules that are one unit each, with no unit inside: sparse experts",
            "sparse MoE blocks of transformers",
        ),
    ] = ()
    names: Annotated[Names, Honoured("such modules by FQN")] = ()
    name_suffixes: Annotated[Names, Honoured("such modules by the last parts of their FQN")] = ()


class ZeroOptimizationBlock(Block):
    """`zero_optimization`: the ZeRO stage, sizes of units and groups, prefetching and offload."""

    stage: Annotated[
        Stage,
        BeforeValidator(_only_int),
        Honoured("0: all replicated; 1: optimizer state sharded; 2: gradients too; 3: parameters too"),
    ] = 0
    stage3_param_persistence_threshold: Annotated[
        Elements,
        Honoured(
            "elements. Smaller fp32 parameters of units that also have low-precision ones, and the root's own, are "
            "all-gathered once per optimizer step in one group, at every stage",
            other_name="param_persistence_threshold",
        ),
    ] = 100_000
    stage3_max_live_parameters: Annotated[
        Elements,
        Honoured(
            "stage 3: elements that may stay unsharded from forward to backward. The last units of the forward stay "
            "so, as many as fit. Default: none",
            1_000_000_000,
            other_name="max_live_parameters",
        ),
    ] = 0
    stage3_prefetch_bucket_size: Annotated[
        Elements,
        Honoured(
            "stage 3: elements to prefetch. A unit starts the all-gathers of the units after it, as many as fit. "
            "Default: FSDP2's, one unit in the backward",
            50_000_000,
            other_name="prefetch_bucket_size",
        ),
    ] = 0
    reduce_bucket_size: Annotated[
        Elements | None,
        Honoured(
            "elements of a merged unit: neighbouring units are all-gathered and reduced as one, as many as fit. 0: no "
            "unit is merged. Default: 4,000,000; at stage 3 also at most 1/16 of the largest unit",
            500_000_000,
        ),
    ] = None
    zero_hpz_partition_size: Annotated[
        PositiveInt,
        Honoured(
            "stage 3: number of ranks over which a parameter is sharded between forward and backward. Must divide the "
            "number of ranks that shard. 1: all of them"
        ),
    ] = 1
    offload_param: OffloadParamBlock | None = None
    offload_optimizer: OffloadOptimizerBlock | None = None
    leaf_module: LeafModuleBlock | None = None
    stage3_gather_16bit_weights_on_model_save: Annotated[
        bool,
        Honoured(
            "`export_hf` writes the low dtype if no dtype is passed, at every stage. Default: fp32",
            other_name="gather_16bit_weights_on_model_save",
        ),
    ] = False
    ignore_unused_parameters: Annotated[
        bool, Unsupported("Remove it: parameters that no rank used have grad None.", (True,))
    ] = True
    contiguous_gradients: Annotated[bool, Native("FSDP2 reduces from one contiguous buffer per group")] = True
    overlap_comm: Annotated[bool | None, Native("FSDP2 always overlaps communication with compute")] = None
    reduce_scatter: Annotated[bool, Native("stages 1 to 3 always reduce-scatter")] = True
    allgather_partitions: Annotated[bool, Native("parameters are always all-gathered")] = True
    allgather_bucket_size: Annotated[Elements, Native("a unit has one all-gather per dtype")] = 500_000_000
    use_multi_rank_bucket_allreduce: Annotated[bool, Native("a group has one reduction, over all ranks")] = True
    round_robin_gradients: Annotated[bool, Native("every parameter is sharded over all ranks")] = False
    parameter_alignment: Annotated[bool, Native("FSDP2 pads shards itself")] = False
    compute_grad_norm: Annotated[bool, Native("the norm is always computed, in the step's all-reduce")] = True
    sub_group_size: Annotated[Elements, Native("torch's optimizers update shards, without a flat copy to divide")] = (
        1_000_000_000
    )
    stage3_model_persistence_threshold: Annotated[
        Elements,
        Native("only stage3_param_persistence_threshold bounds the model-wide group", "model_persistence_threshold"),
    ] = 2**63 - 1
    stage3_max_reuse_distance: Annotated[
        Elements, Native("units reshard after use; see stage3_max_live_parameters", "max_reuse_distance")
    ] = 1_000_000_000
    stage3_module_granularity_threshold: Annotated[
        Count, Native("auto_wrap_policy and leaf_module choose units", "module_granularity_threshold")
    ] = 0
    stage3_use_all_reduce_for_fetch_params: Annotated[
        bool, Native("parameters are always all-gathered", "use_all_reduce_for_fetch_params")
    ] = False
    stage3_allgather_sequential: Annotated[bool, Native("see stage3_prefetch_bucket_size", "allgather_sequential")] = (
        False
    )
    memory_efficient_linear: Annotated[bool, Native("FSDP2 frees the unsharded weights that autograd saves")] = True
    override_module_apply: Annotated[bool, Native("meta-device models are initialised after sharding")] = True
    pipeline_loading_checkpoint: Annotated[bool, Native("there are no pipeline stages")] = False
    load_from_fp32_weights: Annotated[bool, Native("checkpoints contain the fp32 weights")] = True
    elastic_checkpoint: Annotated[bool, Native("checkpoints load on any number of ranks")] = False
    log_trace_cache_warnings: Annotated[bool, Native("the order of fetches is not traced")] = False
    enable_sanity_checks: Annotated[bool, Native("the checks are always on")] = False
    save_muon_momentum_buffer_in_memory: Annotated[bool, Native("only DeepSpeed's Muon reads it")] = False
    zero_quantized_weights: Annotated[bool, Unsupported(_QUANTIZED)] = False
    zero_quantized_nontrainable_weights: Annotated[bool, Unsupported(_QUANTIZED)] = False
    zero_quantized_gradients: Annotated[bool, Unsupported(_QUANTIZED)] = False
    legacy_stage1: Annotated[bool, Unsupported("Remove it: there is one stage 1.")] = False
    zenflow: Annotated[object, Unsupported("Remove it, or use offload_optimizer: there is no ZenFlow.")] = None
    cpu_offload: Annotated[object, Unsupported('Write "offload_optimizer": {"device": "cpu"}.')] = None
    cpu_offload_param: Annotated[object, Unsupported('Write "offload_param": {"device": "cpu"}.')] = None
    cpu_offload_use_pin_memory: Annotated[object, Unsupported("Write pin_memory in the offload blocks.")] = None
    stage3_gather_fp16_weights_on_model_save: Annotated[
        object, Unsupported("Write stage3_gather_16bit_weights_on_model_save.")
    ] = None
    mics_shard_size: Annotated[object, Unsupported("Pass a 2-D mesh (replicate, shard) to wrap_model.", (None, -1))] = (
        None
    )
    mics_hierarchical_params_gather: Annotated[
        object, Unsupported("Pass a 2-D mesh (replicate, shard) to wrap_model.")
    ] = None
    zeropp_loco_param: Annotated[object, Unsupported(_QUANTIZED)] = None

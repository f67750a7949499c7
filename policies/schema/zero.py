"""`zero_optimization`: the ZeRO stage, sizes of units and groups, prefetching and offload."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zeroamp.policies.schema.foreign import with_foreign_keys
from zeroamp.policies.schema.keys import Block, Elements, Honoured, Names, Number, PositiveInt


def _only_int(value: object) -> object:
    # A Literal compares with ==, and True == 1 and 2.0 == 2.
    if type(value) is not int:
        raise ValueError("0, 1, 2 or 3")
    return value


Stage = Literal[0, 1, 2, 3]
Device = Literal["none", "cpu"]
Fraction = Annotated[Number, Field(ge=0, le=1)]


@with_foreign_keys("zero_optimization.offload_param")
class OffloadParamBlock(Block):
    """`offload_param`: offload of the shards to the CPU, as FSDP2 does it."""

    device: Annotated[Device, Honoured("`cpu`: shards, gradients and optimizer state are on the CPU")] = "none"
    pin_memory: Annotated[bool, Honoured("page-locked memory, if there is an accelerator")] = True


@with_foreign_keys("zero_optimization.offload_optimizer")
class OffloadOptimizerBlock(Block):
    """`offload_optimizer`: the optimizer's state is in host memory between the updates."""

    device: Annotated[
        Device, Honoured('`cpu`: without `offload_param`, the same as `zeroamp.offload_between_steps` `["optimizer"]`')
    ] = "none"
    pin_memory: Annotated[
        bool, Honoured("as `offload_param.pin_memory`. State that is offloaded alone is always in page-locked memory")
    ] = True


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


@with_foreign_keys("zero_optimization")
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
            "elements. Smaller fp32 parameters are all-gathered once per optimizer step, in one group of the model",
            other_name="param_persistence_threshold",
        ),
    ] = 100_000
    stage3_max_live_parameters: Annotated[
        Elements,
        Honoured(
            "stage 3: elements that may stay unsharded from forward to backward",
            1_000_000_000,
            other_name="max_live_parameters",
        ),
    ] = 0
    stage3_prefetch_bucket_size: Annotated[
        Elements,
        Honoured(
            "stage 3: elements to prefetch. 0: as FSDP2 does, one unit in the backward",
            50_000_000,
            other_name="prefetch_bucket_size",
        ),
    ] = 0
    zero_hpz_partition_size: Annotated[
        PositiveInt,
        Honoured("stage 3: ranks over which a parameter is sharded between forward and backward. 1: all of them"),
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

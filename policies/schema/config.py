"""The top level of the config, and the block `zeroamp`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo, field_validator

from zeroamp.policies.errors import ConfigError, shown
from zeroamp.policies.schema.foreign import with_foreign_keys
from zeroamp.policies.schema.keys import (
    Block,
    Count,
    Dtype,
    Honoured,
    Names,
    Native,
    Number,
    PositiveInt,
    Steps,
    as_tuple,
    refused,
)
from zeroamp.policies.schema.precision import Bf16Block, DataTypesBlock, Fp16Block, OverrideBlock, TorchAutocastBlock
from zeroamp.policies.schema.zero import ZeroOptimizationBlock

if TYPE_CHECKING:
    from zeroamp.optimizers.typed_params import TypedParams


def _no_deepcompile(block: object) -> object:
    if isinstance(block, dict) and block.get("deepcompile", False) is not False:
        raise refused(
            f"must not have deepcompile {shown(block['deepcompile'])}, because zeroamp has no DeepCompile. Call "
            "torch.compile on the model's blocks before wrap_model."
        )
    return block


def _auto_or_zero(value: object) -> object:
    # A Literal compares with ==, and False == 0.
    if type(value) not in (str, int):
        raise ValueError('"auto" or 0')
    return value


class ZeroampBlock(Block):
    """`zeroamp`: keys that DeepSpeed does not have."""

    reduce_accumulate_dtype: Annotated[
        Literal["fp32", "native"],
        Honoured(
            "sum of gradients over ranks. `fp32`: in fp32, in the order of a balanced tree; `native`: by the backend, "
            "in the communication dtype"
        ),
    ] = "fp32"
    param_gather_dtype: Annotated[
        Literal["float8_e4m3fn"] | None,
        Honoured(
            "weights of Linears are all-gathered in this dtype instead of bf16; the Linears compute in bf16. Needs "
            "torchao: docs/float8.md"
        ),
    ] = None
    overrides: Annotated[
        tuple[OverrideBlock, ...],
        BeforeValidator(as_tuple),
        Honoured(
            "other dtypes for some modules: a list of objects; the first that matches applies (docs/exceptions.md)"
        ),
    ] = ()
    keep_inputs_in_fp32: Annotated[
        Names,
        Honoured(
            "modes `bf16` and `fp16`: names of arguments of forwards, of the model and its units, that are not cast, "
            "such as diffusion timesteps"
        ),
    ] = ()
    external_autocast: Annotated[
        Literal["error", "allow"],
        Honoured(
            "a forward inside your own `torch.autocast`, if `torch_autocast` is off: `error` raises, `allow` runs it"
        ),
    ] = "error"
    offload_between_steps: Annotated[
        tuple[Literal["optimizer"], ...],
        BeforeValidator(as_tuple),
        Honoured('state that is in host memory between the updates, by `TrainStep`: `["optimizer"]` (docs/memory.md)'),
    ] = ()
    dp_replicate_size: Annotated[
        PositiveInt, Honoured("HSDP: number of replicas, each sharded over its part of the ranks, if no mesh is passed")
    ] = 1
    ranks_per_node: Annotated[
        Literal["auto", "off"] | PositiveInt,
        Honoured(
            "ranks per node, for collectives in two levels (docs/precision.md). `auto`: the launcher's "
            "`LOCAL_WORLD_SIZE`, else by the names of hosts; `off` or 1: one level"
        ),
    ] = "auto"
    partials_between_nodes: Annotated[
        Literal["fp32", "bf16"],
        Honoured("dtype in which sums of a node are sent to other nodes: `fp32` is exact; `bf16` halves the bytes"),
    ] = "fp32"
    sync_module_states: Annotated[
        bool,
        Honoured(
            "`wrap_model` broadcasts the first rank's parameters and buffers. With false, parameters that differ "
            "between ranks are an error"
        ),
    ] = False
    reduce: Annotated[
        Literal["mean", "sum"],
        Honoured("whether gradients are averaged or summed over ranks. `sum`: for a loss normalised over all ranks"),
    ] = "mean"
    skip_nonfinite_steps: Annotated[
        bool,
        Honoured(
            "skip steps whose gradient norm is inf or nan, in every mode, as always with float16. The host then waits "
            "for the norm in each step"
        ),
    ] = False
    reproducible: Annotated[
        bool,
        Honoured("the same bits on any number of ranks that is a power of two: docs/reproducible.md"),
    ] = False
    seed: Annotated[
        Count | None,
        Honoured("with `reproducible`: seed of the random numbers in forwards, such as dropout. Default: 0"),
    ] = None
    shard_dim: Annotated[
        Literal["auto", 0],
        BeforeValidator(_auto_or_zero),
        Honoured(
            "dimension over which a parameter is sharded. `auto`: dimension 0, or another one if that avoids padding "
            "(docs/sharding.md)"
        ),
    ] = "auto"
    own_units: Annotated[
        bool,
        Honoured(
            "stage 3: embeddings and output heads outside of all units are units of their own. With false, they stay "
            "unsharded with the root"
        ),
    ] = True
    optional_units: Annotated[
        Names,
        Honoured(
            "modules that only some ranks run in a step, such as a vision tower (docs/ranks.md). Patterns are those of "
            "`zeroamp.overrides`"
        ),
    ] = ()


class _TypedBlock(Block):
    """A block with the name of a class, and its arguments: `zeroamp/optimizers` has the types and the keys of each."""

    @classmethod
    def types(cls) -> "TypedParams":
        """Return the types. Loads their module, so that a config without the block does not."""
        raise NotImplementedError

    @field_validator("type", mode="before", check_fields=False)
    @classmethod
    def _known_type(cls, value: object) -> object:
        return cls.types().known_type(value)

    @field_validator("params", mode="before", check_fields=False)
    @classmethod
    def _of_the_type(cls, value: object, info: ValidationInfo) -> object:
        # Without a valid type the keys of params cannot be checked, and the error of the type is raised.
        return cls.types().params_of(info.data["type"], value) if "type" in info.data else value


class OptimizerBlock(_TypedBlock):
    """`optimizer`: read by `optimizer_from_config` only."""

    type: Annotated[str, Honoured("name of the optimizer, in any case")]
    params: Annotated[Any, Honoured("arguments of the optimizer: see the table of its type")] = Field(
        default=None, validate_default=True
    )
    legacy_fusion: Annotated[bool, Native("torch's optimizers have no such variant")] = False

    @classmethod
    def types(cls) -> "TypedParams":
        """Return the types of optimizers."""
        from zeroamp.optimizers.optimizer_params import TYPES

        return TYPES


class SchedulerBlock(_TypedBlock):
    """`scheduler`: read by `scheduler_from_config` only."""

    type: Annotated[str, Honoured("name of the scheduler, in any case")]
    params: Annotated[Any, Honoured("arguments of the scheduler: see the table of its type")] = Field(
        default=None, validate_default=True
    )

    @classmethod
    def types(cls) -> "TypedParams":
        """Return the types of schedulers."""
        from zeroamp.optimizers.scheduler_params import TYPES

        return TYPES


@with_foreign_keys("")
class Config(Block):
    """All keys of a config. Keys of a block that is not enabled are checked, and have no effect."""

    train_batch_size: Annotated[
        PositiveInt | None,
        Honoured("samples per optimizer step; must be micro-batch size x accumulation steps x data-parallel ranks"),
    ] = None
    train_micro_batch_size_per_gpu: Annotated[PositiveInt | None, Honoured("samples per micro-batch and rank")] = None
    gradient_accumulation_steps: Annotated[
        PositiveInt | None, Honoured("micro-batches per optimizer step and rank. Default: from the batch sizes, else 1")
    ] = None
    gradient_clipping: Annotated[
        Number,
        Field(ge=0),
        Honoured("largest global 2-norm of the gradient; larger ones are scaled down to it. 0: off", 1.0),
    ] = 0.0
    torch_autocast: TorchAutocastBlock = TorchAutocastBlock()
    bf16: Bf16Block = Bf16Block()
    fp16: Fp16Block = Fp16Block()
    data_types: DataTypesBlock = DataTypesBlock()
    communication_data_type: Annotated[
        Dtype | None,
        Honoured(
            "communication dtype of the gradients of low-precision parameters, in mode fp32 of all parameters. "
            "Default: the dtype of the raw gradients"
        ),
    ] = None
    zero_optimization: ZeroOptimizationBlock = ZeroOptimizationBlock()
    zeroamp: ZeroampBlock = ZeroampBlock()
    optimizer: OptimizerBlock | None = None
    scheduler: SchedulerBlock | None = None
    steps_per_print: Annotated[
        Steps | None,
        Honoured(
            "optimizer steps between two log lines of `TrainStep`. Default, 0 and infinity: no lines",
            10,
        ),
    ] = None

    compile: Annotated[
        object,
        AfterValidator(_no_deepcompile),
        Native("without `deepcompile`, which is an error, it has no effect in DeepSpeed either; use torch.compile"),
    ] = None


def validate(cfg: Mapping[str, Any]) -> Config:
    """Return the config as typed blocks.

    Raises:
        ConfigError: keys are unknown, unsupported, or have values of another type. The text has a line for each of
            the first 20.
    """
    try:
        return Config.model_validate(dict(cfg))
    except ValidationError as error:
        from zeroamp.policies.schema.config_errors import explain

        raise ConfigError(explain(error, cfg)) from None

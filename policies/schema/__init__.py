"""The schema of a config: all keys of DeepSpeed 0.19.8 and of the `zeroamp` block, each with its type and class."""

from zeroamp.policies.schema.config import (
    Config,
    OptimizerBlock,
    SchedulerBlock,
    validate,
)
from zeroamp.policies.schema.keys import SAME, Block, Honoured, Key, KeyClass, Native, Unsupported, iter_keys, own_class
from zeroamp.policies.schema.precision import OverrideBlock
from zeroamp.policies.schema.zero import (
    LeafModuleBlock,
    OffloadOptimizerBlock,
    OffloadParamBlock,
    ZeroOptimizationBlock,
)

__all__ = [
    "SAME",
    "Block",
    "Config",
    "Honoured",
    "Key",
    "KeyClass",
    "LeafModuleBlock",
    "Native",
    "OffloadOptimizerBlock",
    "OffloadParamBlock",
    "OptimizerBlock",
    "OverrideBlock",
    "SchedulerBlock",
    "Unsupported",
    "ZeroOptimizationBlock",
    "iter_keys",
    "own_class",
    "validate",
]

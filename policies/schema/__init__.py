"""The config's schema: every key of DeepSpeed 0.19.8 and the `zeroamp` block, each with its type and class."""

from zeroamp.policies.schema.check import validate
from zeroamp.policies.schema.config import Config
from zeroamp.policies.schema.keys import SAME, Block, Honoured, Key, KeyClass, Native, Unsupported, iter_keys
from zeroamp.policies.schema.optimizer import OPTIMIZER_PARAMS, AdamParams, OptimizerBlock, SGDParams
from zeroamp.policies.schema.precision import Fp16Block, TorchAutocastBlock
from zeroamp.policies.schema.scheduler import SCHEDULER_PARAMS, SchedulerBlock

__all__ = [
    "OPTIMIZER_PARAMS",
    "SAME",
    "SCHEDULER_PARAMS",
    "AdamParams",
    "Block",
    "Config",
    "Fp16Block",
    "Honoured",
    "Key",
    "KeyClass",
    "Native",
    "OptimizerBlock",
    "SGDParams",
    "SchedulerBlock",
    "TorchAutocastBlock",
    "Unsupported",
    "iter_keys",
    "validate",
]

"""The config's schema: every key of DeepSpeed 0.19.8 and the `zeroamp` block, each with its type and class."""

from zeroamp.policies.schema.config import Config, Fp16Block, TorchAutocastBlock, validate
from zeroamp.policies.schema.optimizer import OPTIMIZER_PARAMS, AdamParams, OptimizerBlock, SGDParams
from zeroamp.policies.schema.scheduler import SCHEDULER_PARAMS, SchedulerBlock

__all__ = [
    "OPTIMIZER_PARAMS",
    "SCHEDULER_PARAMS",
    "AdamParams",
    "Config",
    "Fp16Block",
    "OptimizerBlock",
    "SGDParams",
    "SchedulerBlock",
    "TorchAutocastBlock",
    "validate",
]

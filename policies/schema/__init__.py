"""The config's schema: every key of DeepSpeed 0.19.8 and the `zeroamp` block, each with its type and class."""

from zeroamp.policies.schema.check import validate
from zeroamp.policies.schema.config import Config
from zeroamp.policies.schema.keys import SAME, Honoured, Key, KeyClass, Native, Unsupported, iter_keys
from zeroamp.policies.schema.precision import Fp16Block, TorchAutocastBlock

__all__ = [
    "SAME",
    "Config",
    "Fp16Block",
    "Honoured",
    "Key",
    "KeyClass",
    "Native",
    "TorchAutocastBlock",
    "Unsupported",
    "iter_keys",
    "validate",
]

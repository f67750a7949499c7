"""The config's schema: every key of DeepSpeed 0.19.8 and the `zeroamp` block, each with its type and class."""

from zeroamp.policies.schema.config import Config, Fp16Block, TorchAutocastBlock, validate

__all__ = ["Config", "Fp16Block", "TorchAutocastBlock", "validate"]

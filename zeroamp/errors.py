"""The exception tree, where users look for it; defined in `zeroamp.policies`, which everything else may import."""

from zeroamp.policies.errors import (
    CheckpointError,
    ConfigError,
    PeerError,
    PrecisionError,
    StepError,
    WrapError,
    ZeroAmpError,
)

__all__ = ["CheckpointError", "ConfigError", "PeerError", "PrecisionError", "StepError", "WrapError", "ZeroAmpError"]

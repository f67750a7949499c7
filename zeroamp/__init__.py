"""zeroamp: torch.autocast numerics and ZeRO stages on native PyTorch FSDP2, from a DeepSpeed-style config."""

from zeroamp.discover import SafeParameters, discover_safe_parameters
from zeroamp.errors import ConfigError, PrecisionError, StepError, WrapError, ZeroAmpError
from zeroamp.plan import Plan, build_plan
from zeroamp.policies import Policy, policy_from_config
from zeroamp.report import Ledger, explain, traffic
from zeroamp.step import TrainStep
from zeroamp.step_report import StepReport
from zeroamp.wrap import register_forward_method, wrap_model

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Ledger",
    "Plan",
    "Policy",
    "PrecisionError",
    "SafeParameters",
    "StepError",
    "StepReport",
    "TrainStep",
    "WrapError",
    "ZeroAmpError",
    "build_plan",
    "discover_safe_parameters",
    "explain",
    "policy_from_config",
    "register_forward_method",
    "traffic",
    "wrap_model",
]

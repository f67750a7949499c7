"""zeroamp: torch.autocast numerics and ZeRO stages on native PyTorch FSDP2, from a DeepSpeed-style config."""

from zeroamp.checkpoint.folder import latest_checkpoint
from zeroamp.checkpoint.load import load_checkpoint
from zeroamp.checkpoint.save import save_checkpoint
from zeroamp.discover import SafeParameters, discover_safe_parameters
from zeroamp.errors import CheckpointError, ConfigError, PeerError, PrecisionError, StepError, WrapError, ZeroAmpError
from zeroamp.optimizers import optimizer_from_config
from zeroamp.plan import Plan, build_plan
from zeroamp.policies import Policy, policy_from_config
from zeroamp.preemption import Preemption
from zeroamp.report import Ledger, explain, traffic
from zeroamp.schedulers import scheduler_from_config
from zeroamp.step import TrainStep
from zeroamp.step_report import StepReport
from zeroamp.verification import Verification
from zeroamp.wrap import register_forward_method, wrap_model

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Ledger",
    "PeerError",
    "Plan",
    "Policy",
    "PrecisionError",
    "Preemption",
    "SafeParameters",
    "StepError",
    "StepReport",
    "TrainStep",
    "Verification",
    "WrapError",
    "ZeroAmpError",
    "build_plan",
    "discover_safe_parameters",
    "explain",
    "latest_checkpoint",
    "load_checkpoint",
    "optimizer_from_config",
    "policy_from_config",
    "register_forward_method",
    "save_checkpoint",
    "scheduler_from_config",
    "traffic",
    "wrap_model",
]

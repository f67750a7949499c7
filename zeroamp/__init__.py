"""zeroamp: torch.autocast numerics and ZeRO stages on native PyTorch FSDP2, from a DeepSpeed-style config."""

from zeroamp.checkpoint.export import export_checkpoint
from zeroamp.checkpoint.folder import latest_checkpoint
from zeroamp.checkpoint.load import load_checkpoint
from zeroamp.checkpoint.save import save_checkpoint
from zeroamp.deepspeed.load import DeepSpeedCheckpoint, load_deepspeed_checkpoint
from zeroamp.discover import SafeParameters, discover_safe_parameters
from zeroamp.dry_run.gpus import GPUS, Gpu
from zeroamp.dry_run.roofline import Efficiency
from zeroamp.dry_run.run_plan import RunPlan, plan_run
from zeroamp.errors import CheckpointError, ConfigError, PeerError, PrecisionError, StepError, WrapError, ZeroAmpError
from zeroamp.export import export_hf
from zeroamp.load_weights import load_hf
from zeroamp.optimizers import optimizer_from_config
from zeroamp.plan import Plan, build_plan
from zeroamp.policies import Policy, policy_from_config
from zeroamp.preemption import Preemption
from zeroamp.profiling import Profile, profile
from zeroamp.report import Ledger, explain, traffic
from zeroamp.reporting.flops import count_flops
from zeroamp.reporting.record import StepRecord
from zeroamp.reporting.run_report import RunReport
from zeroamp.reporting.saved_run import SavedRun, read_run
from zeroamp.schedulers import scheduler_from_config
from zeroamp.step import TrainStep
from zeroamp.step_report import StepReport
from zeroamp.verification import Verification
from zeroamp.version import __version__ as __version__
from zeroamp.wrap import register_forward_method, wrap_model

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DeepSpeedCheckpoint",
    "Efficiency",
    "GPUS",
    "Gpu",
    "Ledger",
    "PeerError",
    "Plan",
    "Policy",
    "PrecisionError",
    "Preemption",
    "Profile",
    "RunPlan",
    "RunReport",
    "SafeParameters",
    "SavedRun",
    "StepError",
    "StepRecord",
    "StepReport",
    "TrainStep",
    "Verification",
    "WrapError",
    "ZeroAmpError",
    "build_plan",
    "count_flops",
    "discover_safe_parameters",
    "explain",
    "export_checkpoint",
    "export_hf",
    "latest_checkpoint",
    "load_checkpoint",
    "load_deepspeed_checkpoint",
    "load_hf",
    "optimizer_from_config",
    "plan_run",
    "policy_from_config",
    "profile",
    "read_run",
    "register_forward_method",
    "save_checkpoint",
    "scheduler_from_config",
    "traffic",
    "wrap_model",
]

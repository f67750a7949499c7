"""zeroamp: torch.autocast numerics and ZeRO stages on native PyTorch FSDP2, from a DeepSpeed-style config.

Public names are imported at their first use. `import zeroamp` itself imports nothing else, not even torch, so that
reading the version or a config does not wait for FSDP2.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from zeroamp.version import __version__ as __version__

if TYPE_CHECKING:
    from zeroamp.checkpoint.export import export_checkpoint as export_checkpoint
    from zeroamp.checkpoint.folder import latest_checkpoint as latest_checkpoint
    from zeroamp.checkpoint.load import load_checkpoint as load_checkpoint
    from zeroamp.checkpoint.preemption import Preemption as Preemption
    from zeroamp.checkpoint.save import save_checkpoint as save_checkpoint
    from zeroamp.deepspeed.load import DeepSpeedCheckpoint as DeepSpeedCheckpoint
    from zeroamp.deepspeed.load import load_deepspeed_checkpoint as load_deepspeed_checkpoint
    from zeroamp.dry_run.efficiency import Efficiency as Efficiency
    from zeroamp.dry_run.gpus import GPUS as GPUS
    from zeroamp.dry_run.gpus import Gpu as Gpu
    from zeroamp.dry_run.run_plan import RunPlan as RunPlan
    from zeroamp.dry_run.run_plan import plan_run as plan_run
    from zeroamp.ledger.explain import Ledger as Ledger
    from zeroamp.ledger.explain import explain as explain
    from zeroamp.ledger.explain import traffic as traffic
    from zeroamp.ledger.verification import Verification as Verification
    from zeroamp.optimizers.from_config import optimizer_from_config as optimizer_from_config
    from zeroamp.optimizers.schedulers import scheduler_from_config as scheduler_from_config
    from zeroamp.planning.discover import SafeParameters as SafeParameters
    from zeroamp.planning.discover import discover_safe_parameters as discover_safe_parameters
    from zeroamp.planning.plan import Plan as Plan
    from zeroamp.planning.plan import build_plan as build_plan
    from zeroamp.policies import Policy as Policy
    from zeroamp.policies import open_auto_keys as open_auto_keys
    from zeroamp.policies import policy_from_config as policy_from_config
    from zeroamp.policies.errors import CheckpointError as CheckpointError
    from zeroamp.policies.errors import ConfigError as ConfigError
    from zeroamp.policies.errors import PeerError as PeerError
    from zeroamp.policies.errors import PrecisionError as PrecisionError
    from zeroamp.policies.errors import StepError as StepError
    from zeroamp.policies.errors import WrapError as WrapError
    from zeroamp.policies.errors import ZeroAmpError as ZeroAmpError
    from zeroamp.reporting.flops import count_flops as count_flops
    from zeroamp.reporting.profiling import Profile as Profile
    from zeroamp.reporting.profiling import profile as profile
    from zeroamp.reporting.run_report import RunReport as RunReport
    from zeroamp.reporting.saved_runs import SavedRun as SavedRun
    from zeroamp.reporting.saved_runs import read_run as read_run
    from zeroamp.reporting.step_record import StepRecord as StepRecord
    from zeroamp.training.callbacks import Callback as Callback
    from zeroamp.training.full_tensors import full_gradient as full_gradient
    from zeroamp.training.full_tensors import full_optimizer_state as full_optimizer_state
    from zeroamp.training.full_tensors import full_parameter as full_parameter
    from zeroamp.training.full_tensors import set_full_gradient as set_full_gradient
    from zeroamp.training.full_tensors import set_full_optimizer_state as set_full_optimizer_state
    from zeroamp.training.full_tensors import set_full_parameter as set_full_parameter
    from zeroamp.training.micro_batch_sampler import MicroBatchSampler as MicroBatchSampler
    from zeroamp.training.step import TrainStep as TrainStep
    from zeroamp.training.step_report import StepReport as StepReport
    from zeroamp.weights.export import export_hf as export_hf
    from zeroamp.weights.load import load_hf as load_hf
    from zeroamp.wrapping.unwrap import unwrap_model as unwrap_model
    from zeroamp.wrapping.wrap import register_forward_method as register_forward_method
    from zeroamp.wrapping.wrap import wrap_model as wrap_model

_HOMES = {
    "Callback": "zeroamp.training.callbacks",
    "CheckpointError": "zeroamp.policies.errors",
    "ConfigError": "zeroamp.policies.errors",
    "DeepSpeedCheckpoint": "zeroamp.deepspeed.load",
    "Efficiency": "zeroamp.dry_run.efficiency",
    "GPUS": "zeroamp.dry_run.gpus",
    "Gpu": "zeroamp.dry_run.gpus",
    "Ledger": "zeroamp.ledger.explain",
    "MicroBatchSampler": "zeroamp.training.micro_batch_sampler",
    "PeerError": "zeroamp.policies.errors",
    "Plan": "zeroamp.planning.plan",
    "Policy": "zeroamp.policies",
    "PrecisionError": "zeroamp.policies.errors",
    "Preemption": "zeroamp.checkpoint.preemption",
    "Profile": "zeroamp.reporting.profiling",
    "RunPlan": "zeroamp.dry_run.run_plan",
    "RunReport": "zeroamp.reporting.run_report",
    "SafeParameters": "zeroamp.planning.discover",
    "SavedRun": "zeroamp.reporting.saved_runs",
    "StepError": "zeroamp.policies.errors",
    "StepRecord": "zeroamp.reporting.step_record",
    "StepReport": "zeroamp.training.step_report",
    "TrainStep": "zeroamp.training.step",
    "Verification": "zeroamp.ledger.verification",
    "WrapError": "zeroamp.policies.errors",
    "ZeroAmpError": "zeroamp.policies.errors",
    "build_plan": "zeroamp.planning.plan",
    "count_flops": "zeroamp.reporting.flops",
    "discover_safe_parameters": "zeroamp.planning.discover",
    "explain": "zeroamp.ledger.explain",
    "export_checkpoint": "zeroamp.checkpoint.export",
    "export_hf": "zeroamp.weights.export",
    "full_gradient": "zeroamp.training.full_tensors",
    "full_optimizer_state": "zeroamp.training.full_tensors",
    "full_parameter": "zeroamp.training.full_tensors",
    "latest_checkpoint": "zeroamp.checkpoint.folder",
    "load_checkpoint": "zeroamp.checkpoint.load",
    "load_deepspeed_checkpoint": "zeroamp.deepspeed.load",
    "load_hf": "zeroamp.weights.load",
    "open_auto_keys": "zeroamp.policies",
    "optimizer_from_config": "zeroamp.optimizers.from_config",
    "plan_run": "zeroamp.dry_run.run_plan",
    "policy_from_config": "zeroamp.policies",
    "profile": "zeroamp.reporting.profiling",
    "read_run": "zeroamp.reporting.saved_runs",
    "register_forward_method": "zeroamp.wrapping.wrap",
    "save_checkpoint": "zeroamp.checkpoint.save",
    "scheduler_from_config": "zeroamp.optimizers.schedulers",
    "set_full_gradient": "zeroamp.training.full_tensors",
    "set_full_optimizer_state": "zeroamp.training.full_tensors",
    "set_full_parameter": "zeroamp.training.full_tensors",
    "traffic": "zeroamp.ledger.explain",
    "unwrap_model": "zeroamp.wrapping.unwrap",
    "wrap_model": "zeroamp.wrapping.wrap",
}
"""Public name -> the module that defines it."""

EXTENSIONS = {
    "zeroamp.recovery": "zeroamp.recovery.recovery:attach_recovery",
    "tensorboard": "zeroamp.reporting.monitors:attach_monitors",
    "csv_monitor": "zeroamp.reporting.monitors:attach_monitors",
    "wandb": "zeroamp.reporting.monitors:attach_monitors",
    "wall_clock_breakdown": "zeroamp.reporting.monitors:attach_monitors",
    "torch.optim.Muon": "zeroamp.optimizers.muon:updating_matrices",
    "TrainStep.saving": "zeroamp.checkpoint.background:saving_of",
}
"""Config key, class of an optimizer, or attribute of the core -> a function outside of the core, as "module:function".

A `TrainStep` imports and calls the function of each key that is on in its config. The core (policies, hooks, planning,
wrapping, training, ledger) depends on other packages only through this table."""

__all__ = sorted(_HOMES)

if not TYPE_CHECKING:  # with `__getattr__`, a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}", name=name, obj=import_module(__name__)
            )
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value  # later uses find it here, without `__getattr__`
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

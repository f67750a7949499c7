"""What is attached to a module or to a collective."""

from zeroamp.hooks._fsdp import (
    abandon,
    complete_accumulation,
    gather_in_background,
    has_own_step,
    has_reduction_options,
    has_step_hooks,
    keep_reduction_inputs,
    modules_to_run,
    release,
    separate_reductions,
    timeout_of,
    unsharded_sums,
    zero_fill_unused,
)
from zeroamp.hooks.all_gather import CountingAllGather
from zeroamp.hooks.autocast import AutocastHook
from zeroamp.hooks.backward_guard import BackwardGuard
from zeroamp.hooks.call_log import Call, CallLog, ZeroBuffers
from zeroamp.hooks.communication_watch import CommunicationWatch
from zeroamp.hooks.evaluation import ReshardAfterEvaluation
from zeroamp.hooks.exit_pause import pause_before_exit
from zeroamp.hooks.forward_watch import Failure, ForwardWatch
from zeroamp.hooks.fp32_region import Fp32Region
from zeroamp.hooks.model_flops import flops_of_run
from zeroamp.hooks.observe import Observations, OpObserver, UnitObserver
from zeroamp.hooks.outer_autocast import OuterAutocastGuard
from zeroamp.hooks.ranges import RANGE_PREFIX, Ranges, UnitRanges
from zeroamp.hooks.recorded_run import can_run_backward, record_run
from zeroamp.hooks.reduce_scatter import ReceiveBuffers, WireReduceScatter
from zeroamp.hooks.safe_module_guard import attach_safe_module_guard
from zeroamp.hooks.safe_parameters import UseRecorder, tensors_in
from zeroamp.hooks.shard_accumulator import ShardAccumulator
from zeroamp.hooks.shared_casts import SharedCasts, linears_that_may_share
from zeroamp.hooks.traffic import Traffic, TrafficKey
from zeroamp.hooks.training_forwards import TrainingForwards
from zeroamp.hooks.typed_groups import (
    Holder,
    attach_typed_group,
    group_policy,
    shard_typed_group,
    typed_group_hooks,
)

__all__ = [
    "AutocastHook",
    "BackwardGuard",
    "Call",
    "CallLog",
    "CommunicationWatch",
    "CountingAllGather",
    "Failure",
    "ForwardWatch",
    "Fp32Region",
    "Holder",
    "Observations",
    "OpObserver",
    "OuterAutocastGuard",
    "RANGE_PREFIX",
    "Ranges",
    "ReceiveBuffers",
    "ReshardAfterEvaluation",
    "ShardAccumulator",
    "SharedCasts",
    "Traffic",
    "TrafficKey",
    "TrainingForwards",
    "UnitObserver",
    "UnitRanges",
    "UseRecorder",
    "WireReduceScatter",
    "ZeroBuffers",
    "abandon",
    "attach_safe_module_guard",
    "attach_typed_group",
    "can_run_backward",
    "complete_accumulation",
    "flops_of_run",
    "gather_in_background",
    "group_policy",
    "has_own_step",
    "has_reduction_options",
    "has_step_hooks",
    "keep_reduction_inputs",
    "linears_that_may_share",
    "modules_to_run",
    "pause_before_exit",
    "record_run",
    "release",
    "separate_reductions",
    "shard_typed_group",
    "tensors_in",
    "timeout_of",
    "typed_group_hooks",
    "unsharded_sums",
    "zero_fill_unused",
]

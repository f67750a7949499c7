"""Decides the dtypes of each parameter in an optimizer step, and the collectives of each group.

Which parameters are safe or computed in fp32 is decided in `safe_parameters.py`; what follows from it for dtypes, only
here. The collectives, FSDP2's mixed-precision policies, the planned traffic, the dry run, the ledger and its
verification, and the tables of `docs/precision.md` read these records.

[Note: Sums of micro-batches]
The bf16 gradient of one micro-batch is sent in bf16 without rounding. The sum of several micro-batches would be
rounded. So a rank that has accumulated micro-batches without a reduction sends their sum in fp32, unless the user has
set a communication dtype. One such exchange sends as many bytes as two in bf16. Sums that were accumulated in bf16 are
sent in bf16, without rounding.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zeroamp.hooks.collectives.traffic import ReduceOp
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.precisions import Precision
from zeroamp.policies.accumulation import accumulation_dtype, sharded_accumulation, unsharded_accumulation
from zeroamp.policies.dtypes import short_name, stored_dtype
from zeroamp.policies.policy import Policy

PER_OP = "per op"
"""The compute dtype of a parameter for which `torch.autocast` chooses a dtype at each op."""

Reduction = Literal["reduce_scatter", "all_to_all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamDtypes:
    """The seven dtypes of one parameter, in the order of an optimizer step."""

    stored: torch.dtype
    """The dtype of the sharded parameter (the master weight), which the optimizer updates."""
    param: torch.dtype
    """The dtype of the all-gather and of the unsharded parameter. With `zeroamp.param_gather_dtype`, that of the values
    that the unsharded weight of a Linear holds."""
    compute: str
    """The dtype of the ops that use the parameter: "bf16" or the like if it is fixed, else `PER_OP`."""
    gradient: torch.dtype | None
    """The dtype of the raw gradient, which autograd produces. Like the next three, None for a frozen parameter."""
    communication: torch.dtype | None
    """The dtype in which the gradient is sent to other ranks."""
    accumulate: torch.dtype | None
    """The dtype of the sum over the micro-batches of an optimizer step."""
    optimizer: torch.dtype | None
    """The dtype of the optimizer's state."""


class GroupKey(NamedTuple):
    """The dtypes that all parameters of a group share. Parameters of one unit with equal keys form one group.

    A frozen parameter has the communication dtype that it would have if it were trained, so that freezing a bias does
    not split a group. Nor does float8: FSDP2 all-gathers the bytes of several dtypes in one buffer.
    """

    stored: torch.dtype
    param: torch.dtype
    """FSDP2's `param_dtype`: the dtype of raw gradients, and of the unsharded parameters that are not float8."""
    communication: torch.dtype
    is_replicated: bool = False
    """Whether the parameters are 0-D: each rank has them whole, and the step's all-reduce sums their gradients."""
    is_ignored: bool = False
    """Whether the parameters are in `ignored_params`: each rank has them whole, and they are never communicated."""
    sends_sums_low: bool = False
    """Whether an override sets `communication` to a low dtype, in which sums of micro-batches are then sent, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupDtypes:
    """The dtypes and collectives of one group on given ranks, for its trainable parameters. From `group_dtypes`."""

    stored: torch.dtype
    """The dtype of the sharded parameters, of their gradients at the optimizer step, and of the optimizer's state."""
    param: torch.dtype
    """FSDP2's `param_dtype`: the dtype of the unsharded parameters that are not float8."""
    unsharded_accumulate: torch.dtype
    """The dtype of the unsharded sum of the config's micro-batches at stages 0 and 1: FSDP2's `reduce_dtype`. fp32 if
    there is no such sum."""
    communication: torch.dtype
    """The dtype of the flat unsharded gradients, in which they are sent to the ranks that shard. See [Note: Sums of
    micro-batches].

    Gradients are rounded to it also if one rank has whole shards, so that the result does not depend on the ranks."""
    reduce: torch.dtype
    """The dtype of the sum over the ranks that shard, which is the reduction's output."""
    sharded_accumulate: torch.dtype
    """The dtype of the sharded sum of micro-batches at stages 2 and 3. fp32 at stages 0 and 1."""
    replica: torch.dtype | None
    """The dtype of the all-reduce over replicas; None without such an all-reduce."""
    replica_once: bool
    """Whether the all-reduce over replicas runs once per optimizer step, on the sum of the micro-batches. Otherwise it
    follows each reduction, because FSDP2 would sum the micro-batches in `reduce` although `sharded_accumulate` differs.
    """
    all_gathers: bool
    """Whether parameters are all-gathered. False if there is one shard."""
    reduction: Reduction | None
    """How gradients are summed over the ranks that shard. "reduce_scatter": the backend sums in `communication`.
    "all_to_all": each rank receives the others' gradients in `communication`, and sums them in fp32 in the order of the
    tree. None if there is one shard."""
    reduction_op: ReduceOp
    """The op of `reduction`. SUM for an all-to-all, which copies."""
    replica_op: ReduceOp
    """The op of the all-reduce over replicas."""
    sums_in_tree_order: bool
    """Whether zeroamp sums over shards and replicas, in the order of `hooks/collectives/tree_sum.py`. Otherwise the
    backend sums, in an order that is not defined."""

    @property
    def between_ranks(self) -> torch.dtype:
        """The dtype in which gradients leave a rank: with one shard that of the all-reduce, else `communication`."""
        return self.communication if self.replica is None or self.reduction is not None else self.replica

    def on_these_ranks(self, dtypes: ParamDtypes) -> ParamDtypes:
        """Return the dtypes of one of the group's parameters, with the communication dtype of these ranks."""
        return dtypes if dtypes.communication is None else replace(dtypes, communication=self.between_ranks)


def param_dtypes(parameter: nn.Parameter, policy: Policy, precision: Precision) -> tuple[ParamDtypes, GroupKey]:
    """Return the dtypes of a parameter, and the key of its group.

    A parameter that is stored in another dtype than fp32 is frozen. It is all-gathered in the dtype in which it is
    stored.
    """
    stored = stored_dtype(parameter)
    if parameter.dim() == 0:
        return _replicated_dtypes(stored, is_trained=parameter.requires_grad)
    is_low = precision.is_low and stored == torch.float32
    low = policy.param_dtype if is_low else stored
    param = precision.param if is_low else None
    computes_in = {"low": policy.param_dtype, "fp32": torch.float32, "as stored": stored}
    compute = PER_OP if precision.compute == PER_OP else short_name(computes_in[precision.compute])
    communication, is_set = communication_dtype(policy, is_low=is_low), False
    if precision.communication is not None and stored == torch.float32:
        communication = precision.communication
        is_set = communication != torch.float32
    key = GroupKey(stored, low, communication, sends_sums_low=is_set)
    is_trained = parameter.requires_grad
    dtypes = ParamDtypes(
        stored=stored,
        param=param or low,
        compute=compute,
        gradient=low if is_trained else None,
        communication=_in_step(key, policy) if is_trained else None,
        accumulate=accumulation_dtype(policy) if is_trained else None,
        optimizer=_states_dtype(stored, policy) if is_trained else None,
    )
    return dtypes, key


def _replicated_dtypes(stored: torch.dtype, *, is_trained: bool) -> tuple[ParamDtypes, GroupKey]:
    """Return the dtypes and key of a 0-D parameter. Ops read it as it is stored, and its gradient is summed in fp32."""
    dtypes = ParamDtypes(
        stored=stored,
        param=stored,
        compute=PER_OP,
        gradient=stored if is_trained else None,
        communication=torch.float64 if is_trained else None,
        accumulate=torch.float32 if is_trained else None,
        optimizer=stored if is_trained else None,
    )
    return dtypes, GroupKey(stored, stored, torch.float64, is_replicated=True)


def ignored_dtypes(parameter: nn.Parameter, policy: Policy) -> tuple[ParamDtypes, GroupKey]:
    """Return the dtypes and key of one of `ignored_params`, which is neither cast nor communicated."""
    stored, is_trained = parameter.dtype, parameter.requires_grad
    dtypes = ParamDtypes(
        stored=stored,
        param=stored,
        compute=PER_OP if policy.mode == "autocast" else short_name(stored),
        gradient=stored if is_trained else None,
        communication=None,
        accumulate=stored if is_trained else None,
        optimizer=_states_dtype(stored, policy) if is_trained else None,
    )
    return dtypes, GroupKey(stored, stored, stored, is_ignored=True)


def _states_dtype(stored: torch.dtype, policy: Policy) -> torch.dtype:
    return policy.optimizer_states_dtype or stored if stored == torch.float32 else stored


def unit_key(policy: Policy) -> GroupKey:
    """Return the key of a parameter in the mode's low precision. A model need not have such a parameter."""
    return GroupKey(torch.float32, policy.param_dtype, communication_dtype(policy, is_low=policy.low_dtype is not None))


def communication_dtype(policy: Policy, *, is_low: bool) -> torch.dtype:
    """Return the communication dtype of gradients for which no override sets one."""
    if not is_low and policy.mode != "fp32":
        return torch.float32
    if policy.stage == 0 and policy.reduce_accumulate_dtype == "fp32":
        return torch.float32  # an all-reduce sums in the dtype that it sends, so fp32 sums need fp32
    return policy.communication_dtype


def communication_of_sums(key: GroupKey, policy: Policy) -> torch.dtype:
    """Return the communication dtype of sums of several micro-batches: see [Note: Sums of micro-batches]."""
    if key.sends_sums_low or policy.communication_data_type is not None:
        return key.communication
    return torch.promote_types(key.communication, unsharded_accumulation(policy))


def _in_step(key: GroupKey, policy: Policy) -> torch.dtype:
    """Return the communication dtype in the config's optimizer step."""
    sums_micro_batches = policy.stage < 2 and policy.gradient_accumulation_steps > 1
    return communication_of_sums(key, policy) if sums_micro_batches else key.communication


def group_dtypes(key: GroupKey, policy: Policy, ranks: Ranks, *, sends_sums: bool | None = None) -> GroupDtypes:
    """Return the dtypes and collectives of the groups with this key on these ranks.

    An unknown number of ranks counts as more than one, and as no replicas of shards.

    `sends_sums`: whether the reduction is of sums of several micro-batches. None: as in the config's optimizer step.
    """
    if key.is_replicated or key.is_ignored:
        return GroupDtypes(
            stored=key.stored,
            param=key.param,
            unsharded_accumulate=torch.float32,
            communication=key.communication,
            reduce=key.communication,
            sharded_accumulate=torch.float32,
            replica=None,
            replica_once=True,
            all_gathers=False,
            reduction=None,
            reduction_op=dist.ReduceOp.SUM,
            replica_op=dist.ReduceOp.SUM,
            sums_in_tree_order=False,
        )
    communication = key.communication
    if sends_sums is not False:
        communication = communication_of_sums(key, policy) if sends_sums else _in_step(key, policy)
    num_shards = ranks.shards(policy)
    sums_in_fp32 = policy.reduce_accumulate_dtype == "fp32"
    # gloo and NCCL average fp16 by summing first: replicas of an fp16 shard would overflow.
    is_averaged_in_fp32 = communication == torch.float16 and (ranks.num_replicas or 1) > 1
    reduce = torch.float32 if sums_in_fp32 or is_averaged_in_fp32 else communication
    has_replicas = policy.stage == 0 or (ranks.num_replicas is not None and num_shards is not None)
    if sums_in_fp32 and ranks.num_replicas == 1:
        has_replicas = False  # FSDP2's own all-reduce, of the other cases, runs over an axis of one rank too
    reduction: Reduction | None = None
    if num_shards != 1:
        reduction = "all_to_all" if sums_in_fp32 else "reduce_scatter"
    unsharded_accumulate = unsharded_accumulation(policy)
    # With float16 accumulation, FSDP2 passes SUM and divides itself.
    averages = policy.reduce == "mean" and not ranks.is_one and unsharded_accumulate != torch.float16
    op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
    is_divided_here = reduction == "reduce_scatter" and communication == torch.float16
    return GroupDtypes(
        stored=key.stored,
        param=key.param,
        unsharded_accumulate=unsharded_accumulate,
        communication=communication,
        reduce=reduce,
        sharded_accumulate=sharded_accumulation(policy),
        replica=reduce if has_replicas else None,
        replica_once=policy.stage < 2 or reduce == sharded_accumulation(policy),
        all_gathers=num_shards != 1,
        reduction=reduction,
        reduction_op=dist.ReduceOp.SUM if reduction == "all_to_all" or is_divided_here else op,
        replica_op=dist.ReduceOp.SUM if sums_in_fp32 else op,
        sums_in_tree_order=sums_in_fp32,
    )

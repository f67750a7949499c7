"""Which dtype is used at each boundary of an optimizer step, and which collectives a group issues.

Dtypes and collectives are decided only here. The collectives, FSDP2's mixed-precision policies, the planned traffic,
the dry run, the ledger and its verification, recovery, and the tables of `docs/precision.md` read these records.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zeroamp.hooks.collectives.traffic import ReduceOp
from zeroamp.planning.mesh import Ranks
from zeroamp.planning.safe_parameters import Precision
from zeroamp.policies.accumulation import accumulation_dtype, sharded_accumulation, unsharded_accumulation
from zeroamp.policies.dtypes import short_name, stored_dtype
from zeroamp.policies.policy import Policy

PER_OP = "per op"
"""The compute dtype of a parameter that `torch.autocast` casts, or does not cast, at each op."""

Reduction = Literal["reduce_scatter", "all_to_all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamDtypes:
    """The seven dtypes of one parameter, in the order of an optimizer step."""

    stored: torch.dtype
    """Of the sharded parameter (the master weight), which the optimizer updates."""
    param: torch.dtype
    """Of the unsharded parameter, and of its all-gather. With `zeroamp.param_gather_dtype`, of the values that the
    unsharded weight of a Linear holds."""
    compute: str
    """Of the ops that consume it: "bf16" and so on where it is fixed, else `PER_OP`."""
    gradient: torch.dtype | None
    """Of the raw, unsharded gradient. This and the next three are None for a frozen parameter."""
    communication: torch.dtype | None
    """Of the gradient when it is sent to other ranks."""
    accumulate: torch.dtype | None
    """Of the sum over the micro-batches of an optimizer step."""
    optimizer: torch.dtype | None
    """Of the optimizer's state."""


class GroupKey(NamedTuple):
    """What the parameters of one group have in common: parameters of one unit with equal keys are one group.

    A frozen parameter has the communication dtype that it would have if it were trained, so that freezing a bias does
    not split a group. A parameter that is stored in another dtype than fp32 cannot be trained: whether it is safe
    splits nothing. Nor does float8 split a group: FSDP2 all-gathers the bytes of several dtypes in one buffer.
    """

    stored: torch.dtype
    param: torch.dtype
    """FSDP2's `param_dtype`: of the raw gradients, and of the unsharded parameters where they are not float8."""
    communication: torch.dtype
    is_replicated: bool = False
    """Whether the parameters are 0-D: every rank holds them whole, and the step's all-reduce sums their gradients."""
    is_ignored: bool = False
    """Whether the parameters are of `ignored_params`: the caller's own, whole on each rank, and never communicated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupDtypes:
    """The dtypes and collectives of one group on given ranks, for its trainable parameters. From `group_dtypes`."""

    stored: torch.dtype
    """Of the sharded parameters, of their gradients at the optimizer step, and of the optimizer's state."""
    param: torch.dtype
    """FSDP2's `param_dtype`: of the unsharded parameters where they are not float8."""
    unsharded_accumulate: torch.dtype
    """Of the unsharded sum of the config's micro-batches at stages 0 and 1: FSDP2's `reduce_dtype`. fp32 where there is
    no such sum."""
    communication: torch.dtype
    """Of the flat unsharded gradients, as they are sent to the ranks that shard."""
    reduce: torch.dtype
    """Of the sum over the ranks that shard: of the reduction's output."""
    sharded_accumulate: torch.dtype
    """Of the sharded sum of micro-batches at stages 2 and 3. fp32 at stages 0 and 1."""
    replica: torch.dtype | None
    """Of the all-reduce over replicas; None where there is none."""
    replica_once: bool
    """Whether the all-reduce over replicas runs once per optimizer step, on the sum of the micro-batches. Else it
    follows each reduction, because FSDP2 would sum the micro-batches in `reduce` although `sharded_accumulate` differs.
    """
    all_gathers: bool
    """Whether parameters are all-gathered: not where one rank holds them whole."""
    reduction: Reduction | None
    """How gradients are summed over the ranks that shard: "reduce_scatter" by the backend, in `communication`;
    "all_to_all" by each rank, in fp32 and in the order of the tree, after it received the others' gradients in
    `communication`. None where one rank holds them whole."""
    reduction_op: ReduceOp
    """What `reduction` is issued with. An all-to-all copies, which is noted as SUM."""
    replica_op: ReduceOp
    """What the all-reduce over replicas is issued with."""
    sums_in_tree_order: bool
    """Whether zeroamp itself sums over shards and replicas, in the order of `hooks/collectives/tree_sum.py`. Else the
    backend sums, in an order of its own."""

    @property
    def between_ranks(self) -> torch.dtype:
        """The dtype in which gradients leave a rank: that of the all-reduce over replicas where nothing is sharded."""
        return self.communication if self.replica is None or self.reduction is not None else self.replica

    def on_these_ranks(self, dtypes: ParamDtypes) -> ParamDtypes:
        """Return the dtypes of one of the group's parameters, with the communication dtype of these ranks."""
        return dtypes if dtypes.communication is None else replace(dtypes, communication=self.between_ranks)


def param_dtypes(parameter: nn.Parameter, policy: Policy, precision: Precision) -> tuple[ParamDtypes, GroupKey]:
    """Return the dtypes of a parameter, and what a parameter must share with it to be in the same group.

    A parameter that is stored in another dtype than fp32 is frozen: it is all-gathered as it is stored, which is
    smaller.
    """
    stored = stored_dtype(parameter)
    if parameter.dim() == 0:
        return _replicated_dtypes(stored, is_trained=parameter.requires_grad)
    is_low = precision.is_low and stored == torch.float32
    low = policy.gather_dtype if is_low else stored
    param = policy.param_gather_dtype if is_low and precision.is_float8 else None
    computes_in = {"low": policy.gather_dtype, "fp32": torch.float32, "as stored": stored, "float8": param or low}
    compute = PER_OP if precision.compute == PER_OP else short_name(computes_in[precision.compute])
    communication = communication_dtype(policy, is_low=is_low)
    if precision.communication is not None and stored == torch.float32:
        communication = precision.communication
    is_trained = parameter.requires_grad
    dtypes = ParamDtypes(
        stored=stored,
        param=param or low,
        compute=compute,
        gradient=low if is_trained else None,
        communication=communication if is_trained else None,
        accumulate=accumulation_dtype(policy) if is_trained else None,
        optimizer=stored if is_trained else None,
    )
    return dtypes, GroupKey(stored, low, communication)


def _replicated_dtypes(stored: torch.dtype, *, is_trained: bool) -> tuple[ParamDtypes, GroupKey]:
    """Return the dtypes of a 0-D parameter: used as stored in every mode, its gradient accumulated in fp32."""
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
    """Return the dtypes of one of `ignored_params`: nothing casts or communicates it. Autograd sums its gradient."""
    stored, is_trained = parameter.dtype, parameter.requires_grad
    dtypes = ParamDtypes(
        stored=stored,
        param=stored,
        compute=PER_OP if policy.mode == "autocast" else short_name(stored),
        gradient=stored if is_trained else None,
        communication=None,
        accumulate=stored if is_trained else None,
        optimizer=stored if is_trained else None,
    )
    return dtypes, GroupKey(stored, stored, stored, is_ignored=True)


def unit_key(policy: Policy) -> GroupKey:
    """Return the key of a parameter that is in the mode's low precision, also where no parameter is."""
    return GroupKey(
        torch.float32, policy.gather_dtype, communication_dtype(policy, is_low=policy.low_dtype is not None)
    )


def communication_dtype(policy: Policy, *, is_low: bool) -> torch.dtype:
    """Return the communication dtype of gradients for which no override sets one."""
    if not is_low and policy.mode != "fp32":
        return torch.float32
    if policy.stage == 0 and policy.reduce_accumulate_dtype == "fp32":
        return torch.float32  # an all-reduce sums in the dtype that it sends, so fp32 sums need fp32
    return policy.wire_dtype


def group_dtypes(key: GroupKey, policy: Policy, ranks: Ranks) -> GroupDtypes:
    """Decide the dtypes and collectives of a group of parameters with this key on these ranks.

    Where the number of ranks is not known, it is taken for more than one, and no shards are averaged over replicas.
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
    num_shards = ranks.shards(policy)
    sums_in_fp32 = policy.reduce_accumulate_dtype == "fp32"
    # gloo and NCCL average fp16 by summing first: replicas of an fp16 shard would overflow.
    is_averaged_in_fp32 = key.communication == torch.float16 and (ranks.num_replicas or 1) > 1
    reduce = torch.float32 if sums_in_fp32 or is_averaged_in_fp32 else key.communication
    has_replicas = policy.stage == 0 or (ranks.num_replicas is not None and num_shards is not None)
    if sums_in_fp32 and ranks.num_replicas == 1:
        has_replicas = False  # FSDP2's own all-reduce, of the other cases, runs over an axis of one rank too
    reduction: Reduction | None = None
    if num_shards != 1:
        reduction = "all_to_all" if sums_in_fp32 else "reduce_scatter"
    unsharded_accumulate = unsharded_accumulation(policy)
    # FSDP2 sums, and divides itself, where it accumulates in float16.
    averages = policy.reduce == "mean" and not ranks.is_one and unsharded_accumulate != torch.float16
    op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
    is_divided_here = reduction == "reduce_scatter" and key.communication == torch.float16
    return GroupDtypes(
        stored=key.stored,
        param=key.param,
        unsharded_accumulate=unsharded_accumulate,
        communication=key.communication,
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

"""Chooses the dimension over which a parameter is sharded, and computes the sizes of shards and their memory.

FSDP2 pads dimension 0 to a multiple of the ranks that shard it. Each rank has ceil(d0 / ranks) rows of a parameter of
shape (d0, …), and ranks x ceil(d0 / ranks) rows are communicated. Another dimension is divided evenly.

[Note: The sharded dimension]
By default FSDP2 shards dimension 0, in parts of ceil(d0 / ranks) rows. If the number of ranks does not divide d0,
shards contain padding, which all-gathers and reductions move too: 8 experts over 64 ranks are padded to 64 rows. FSDP2
shards another dimension only if the number of ranks divides it, so it is never padded. But its shards are not
consecutive in the unsharded parameter. FSDP2 then copies the parameter once more after each all-gather, and its
gradient once more before each reduction. Each copy reads and writes all bytes, and needs a second buffer for that
moment. So another dimension is chosen only if the padding of dimension 0 is at least `LEAST_GAIN` of the elements. At
4,096 ranks, padding is 2 % for the 128,256 rows of LLaMA-3's vocabulary, and 300 % for its key and value projections.
At 64 ranks it is 0.1 % for 50,257 rows.

If the number of ranks divides several of the other dimensions, the first is chosen: its shards have the longest
consecutive runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.planning.parameter_uses import has_own_storage_class
from zeroamp.policies.accumulation import unsharded_accumulation
from zeroamp.policies.dtypes import stored_dtype
from zeroamp.policies.policy import Policy

if TYPE_CHECKING:
    from zeroamp.planning.groups import ParamPlan

LEAST_GAIN = 0.01
"""Another dimension is chosen if the padding of dimension 0 is at least this part of the parameter's elements."""


def may_shard_any_dim(parameter: nn.Parameter, policy: Policy) -> bool:
    """Return whether a parameter may be sharded over another dimension than 0.

    False if the config sets `zeroamp.shard_dim` to 0, and for:

    * a secondary partition (hpZ): FSDP2 shards the secondary partition over dimension 0;
    * a tensor subclass with an all-gather of its own, whose inputs need not have the parameter's dimensions;
    * a DTensor (tensor or expert parallelism), of which another dimension may be distributed already;
    * a quantized or integer parameter: packed values do not have the weight's dimensions;
    * a parameter with one dimension or without elements.
    """
    return (
        policy.shard_dim == "auto"
        and policy.hpz_partition_size == 1
        and not isinstance(parameter, DTensor)
        and not has_own_storage_class(parameter)
        and not hasattr(parameter, "quant_state")
        and stored_dtype(parameter).is_floating_point
        and parameter.dim() > 1
        and parameter.numel() > 0
    )


def shard_dim(shape: Sequence[int], num_shards: int | None, *, any_dim: bool) -> int:
    """Return the dimension over which FSDP2 shards a parameter. See [Note: The sharded dimension].

    Args:
        shape: of the parameter, at least one dimension.
        num_shards: the number of ranks over which it is sharded. With None (not known) the result is 0.
        any_dim: whether another dimension than 0 may be chosen, from `may_shard_any_dim`.
    """
    if not any_dim or num_shards is None:
        return 0
    numel = math.prod(shape)
    if numel_of_shards(shape, 0, num_shards) - numel < LEAST_GAIN * numel:
        return 0
    return next((dim for dim, length in enumerate(shape) if dim > 0 and length % num_shards == 0), 0)


def numel_of_shards(shape: Sequence[int], dim: int, num_shards: int) -> int:
    """Return the number of elements of all shards together. Dimension `dim` is padded to a multiple of the ranks."""
    others = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    return -(-shape[dim] // num_shards) * num_shards * others


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one rank for a parameter. Tensors that autograd saves, and optimizer state, are not counted."""

    stored: int
    """Bytes of the shard: ceil(d / ranks) of the sharded dimension x the other dimensions x bytes of the dtype."""
    unsharded: int
    """Bytes of the unsharded parameter while it exists: elements of all ranks' shards x bytes of its dtype."""
    gradient: int
    """Bytes of the gradient shard at the optimizer step, which is as large as the stored shard. At stages 0 and 1 with
    accumulation, plus the unsharded sum until the reduction: elements x bytes of the accumulation dtype. 0 if frozen.
    """


def padded_numel(param: "ParamPlan", num_shards: int | None) -> int:
    """Return the number of elements of a parameter with FSDP2's padding; without, if `num_shards` is None."""
    if num_shards is None:
        return param.numel
    return numel_of_shards(param.shape, param.shard_dim(num_shards), num_shards)


def local_numel(param: "ParamPlan", num_shards: int) -> int:
    """Return the number of elements of one rank's shard of a parameter, padding included."""
    is_whole = param.group_key.is_replicated or param.group_key.is_ignored
    return param.numel if is_whole else padded_numel(param, num_shards) // num_shards


def param_memory(param: "ParamPlan", policy: Policy, num_shards: int) -> Memory:
    """Return the bytes of one rank for a parameter, by the formulas of `Memory`.

    0-D and ignored parameters are whole on each rank, and are never all-gathered.
    """
    if param.group_key.is_replicated or param.group_key.is_ignored:
        size = param.numel * param.dtypes.stored.itemsize
        return Memory(stored=size, unsharded=0, gradient=size if param.is_trainable else 0)
    padded = padded_numel(param, num_shards)
    stored = padded // num_shards * param.dtypes.stored.itemsize
    accumulates = policy.stage < 2 and policy.gradient_accumulation_steps > 1
    unsharded_sum = param.numel * unsharded_accumulation(policy).itemsize if accumulates else 0
    return Memory(
        stored=stored,
        unsharded=padded * param.dtypes.param.itemsize,
        gradient=stored + unsharded_sum if param.is_trainable else 0,
    )

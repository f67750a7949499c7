"""Which dimension of a parameter is sharded.

[Note: The sharded dimension]
By default FSDP2 shards dimension 0, in parts of ceil(d0 / ranks) rows. Where the ranks do not divide d0, all-gathers
and reductions move padding, and shards hold it: 8 experts over 64 ranks are padded to 64 rows. FSDP2 shards another
dimension only if the ranks divide it, so it is never padded. But its shards are not consecutive in the unsharded
parameter. FSDP2 then copies the parameter once more after each all-gather, and its gradient once more before
each reduction. Each copy reads and writes all bytes, and needs a second buffer for that moment. So another dimension is
chosen only where the padding of dimension 0 is at least `LEAST_GAIN` of the elements. At 4,096 ranks, the 128,256 rows
of LLaMA-3's vocabulary are 2 % of padding, and its key and value projections 300 %. At 64 ranks and 50,257 rows there
is 0.1 %.

Where the ranks divide several of the other dimensions, the first of them is taken: its shards have the longest
consecutive runs.
"""

import math
from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from zeroamp.planning.parameter_uses import has_own_storage_class
from zeroamp.policies.dtypes import stored_dtype
from zeroamp.policies.policy import Policy

LEAST_GAIN = 0.01
"""Padding of dimension 0, as a part of the parameter's elements, from which on another dimension is taken."""


def may_shard_any_dim(parameter: nn.Parameter, policy: Policy) -> bool:
    """Return whether a parameter may be sharded over another dimension than 0.

    Not if the config has `zeroamp.shard_dim` 0, nor in these cases:

    * a secondary partition (hpZ): FSDP2 shards the secondary partition over dimension 0;
    * a tensor subclass with an all-gather of its own, whose inputs need not have the parameter's dimensions;
    * a DTensor (tensor or expert parallelism), of which another dimension may be distributed already;
    * quantized or integer parameters: packed values do not have the weight's dimensions;
    * one dimension, or no elements.
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
        num_shards: ranks that it is sharded over; None if not known, which gives 0.
        any_dim: whether another dimension than 0 may be taken, from `may_shard_any_dim`.
    """
    if not any_dim or num_shards is None:
        return 0
    numel = math.prod(shape)
    if numel_of_shards(shape, 0, num_shards) - numel < LEAST_GAIN * numel:
        return 0
    return next((dim for dim, length in enumerate(shape) if dim > 0 and length % num_shards == 0), 0)


def numel_of_shards(shape: Sequence[int], dim: int, num_shards: int) -> int:
    """Return the elements of all shards together: dimension `dim` is padded to a multiple of the ranks."""
    others = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    return -(-shape[dim] // num_shards) * num_shards * others

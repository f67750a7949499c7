"""FSDP2's extension of one parameter's all-gather, for a parameter whose shard is a plain tensor.

FSDP2 calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` of a shard that is a tensor subclass. A shard of such a
class would be so everywhere: in optimizers, checkpoints and exports. Here the shard stays plain, and another object has
the two methods: FSDP2 reads both from the one property `_sharded_local_tensor`, which it uses for nothing else.

Checked on torch 2.11.0, 2.13.0 and 2.15.0; `tests/hooks/_torch/test_all_gather_extension.py` fails when this changes.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zeroamp.hooks._torch.fsdp import groups_of, units_of


class AllGatherExtension(Protocol):
    """What FSDP2 calls around the all-gather of one parameter."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return the tensors that this rank sends, and what `fsdp_post_all_gather` needs beside them."""

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        """Return the unsharded parameter and the tensors that hold its memory; with `out`, complete that instead."""


class ShardOf:
    """This rank's shard of one parameter, padded as FSDP2 all-gathers it."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter  # FSDP2 replaces the shard's memory when the module moves or loads

    @property
    def padded(self) -> torch.Tensor:
        """The shard in its own shape. The same number of elements on all ranks; zeros where it is padded."""
        shard: torch.Tensor = self._parameter._sharded_param_data.view(self._parameter.padded_sharded_param_size)
        return shard

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The flat memory, the DTensor and its local tensor: an in-place op counts in the version of one of them."""
        dtensor = self._parameter.sharded_param
        return self._parameter._sharded_param_data, dtensor, dtensor._local_tensor

    @property
    def is_sharded(self) -> bool:
        """Whether the next use of the parameter needs an all-gather."""
        is_sharded: bool = self._parameter.sharded_state.name == "SHARDED"
        return is_sharded

    def extend(self, extension: AllGatherExtension) -> None:
        """Let FSDP2 call `extension` around each all-gather of the parameter from now on. Call before the first."""
        self._parameter.__class__ = _extended(cast(Hashable, type(self._parameter)))
        self._parameter.all_gather_extension = extension
        self._parameter._init_extensions()


@cache
def _extended(parameter_class: Any) -> Any:
    """Return the class of FSDP2's parameters with another `_sharded_local_tensor`."""
    return type(
        f"Extended{parameter_class.__name__}",
        (parameter_class,),
        {"_sharded_local_tensor": property(lambda parameter: parameter.all_gather_extension)},
    )


def shards_of(root: nn.Module, fqns: Iterable[str]) -> Iterator[ShardOf]:
    """Yield the shards of the named parameters of a sharded model, in the order of the names."""
    groups = (group for unit in units_of(root) for group in groups_of(unit._get_fsdp_state()))
    by_id = {id(each.sharded_param): each for group in groups for each in group.fsdp_params}
    for fqn in fqns:
        yield ShardOf(by_id[id(root.get_parameter(fqn))])


def largest_magnitudes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the largest absolute value of each tensor, none of them empty: (number of tensors,)."""
    return torch.stack(torch._foreach_norm(list(tensors), float("inf")))

"""Records the collectives that reach the process group, below FSDP2 and below zeroamp."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zeroamp.hooks.collectives.all_gather import GroupAllGather

KINDS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "allreduce_": "all_reduce",
}


def first_tensor(value):
    return value if isinstance(value, torch.Tensor) else first_tensor(value[0])


class Collectives(TorchDispatchMode):
    """`calls`: Counter of (kind, dtype). `elements`: the unsharded elements of each.

    Only for counting: a dispatch mode changes the last bits of results.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.elements = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            kind = KINDS.get(func._schema.name.split("::")[1], func._schema.name)
            tensor = first_tensor(args[0])  # the output: for an all-gather the unsharded size
            if kind == "reduce_scatter":
                tensor = first_tensor(args[1])
            self.calls[kind, tensor.dtype] += 1
            self.elements[kind, tensor.dtype] += tensor.numel()
        return func(*args, **(kwargs or {}))


class Gathers:
    """`log`: the all-gathers of zeroamp's groups in the order of their calls, as (group, ranks that gather).

    What else happens may be put between them.
    """

    def __init__(self):
        self.log = []

    def __enter__(self):
        self._original = original = GroupAllGather.__call__

        def call(comm, output_tensor, input_tensor, group, async_op=False):
            self.log.append((comm.group_name, group.size()))
            return original(comm, output_tensor, input_tensor, group, async_op)

        GroupAllGather.__call__ = call
        return self

    def __exit__(self, *_):
        GroupAllGather.__call__ = self._original

"""Refuses devices without fp64, because `TrainStep` sums its statistics over the ranks in fp64.

[Note: Why fp64]
Some numbers of the step's all-reduce hold three counts in 51 bits, and must be exact (see `unused_parameters.py`). Two
fp32 numbers hold only 48 bits together, and a sum over ranks would round each of them. So they cannot replace fp64.
"""

import torch
import torch.distributed as dist

from zeroamp.policies.errors import StepError

_WITH_FP64 = frozenset({"cpu", "cuda"})
"""Device types whose devices and backends (gloo, NCCL) all have fp64. They are not tested."""


def refuse_without_fp64(device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Test fp64 on devices that may lack it (MPS, some XPUs and HPUs). All ranks of `group` call this.

    The test computes three elements and all-reduces them over the ranks (maximum).

    Args:
        device: where the step's statistics are summed.
        group: all ranks of the mesh. None: the default group.

    Raises:
        StepError: the device, or the backend of its collectives, has no fp64.
    """
    if device.type in _WITH_FP64:
        return
    found: object
    try:
        numbers = torch.full((3,), 2.0**52, dtype=torch.float64, device=device).add_(1)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
        found = numbers.tolist()
    # torch has no error class of its own for this: MPS raises TypeError, kernels and backends RuntimeError.
    except (TypeError, RuntimeError) as error:
        found = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if found != [2.0**52 + 1] * 3:
        raise StepError(
            f"TrainStep sums the loss, the gradient norm and exact counts over the ranks in fp64, which the device "
            f"{device} or its collectives do not have ({found}). Train on a device with fp64, or without a TrainStep: "
            "loss.backward(), optimizer.step(), optimizer.zero_grad()."
        )

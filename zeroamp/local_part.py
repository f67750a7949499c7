"""What of a tensor is on this rank."""

import torch
from torch.distributed.tensor import DTensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, in the same memory; of any other tensor all.

    Under `torch.no_grad` it costs an attribute's read; else it is an autograd function.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

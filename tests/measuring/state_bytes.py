"""Bytes of the parts of a training's state on the device, counted by storages."""

import gc

from torch.distributed.tensor import DTensor

from zeroamp.hooks._torch.dispatch import storage_key
from zeroamp.host_memory.storages import HostCopies


def bytes_of(model, optimizer, part):
    """Return the bytes of "params", "grads" or "optimizer" in the device's memory of this rank.

    The device of the tests is the CPU, so a tensor in host memory is recognised by the copies of `HostCopies`. It has
    bytes on the device too if anything retains the storage that it had there.
    """
    if part == "optimizer":
        tensors = [value for values in optimizer.state.values() for value in values.values()]
    else:
        tensors = [p if part == "params" else p.grad for p in model.parameters()]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors if each is not None]
    origins = {}
    for each in gc.get_referrers(HostCopies):
        origins |= each._origins if isinstance(each, HostCopies) else {}
    num_bytes = 0
    for tensor in local:
        storage = tensor.untyped_storage()
        if (key := storage_key(tensor)) in origins:
            storage = origins[key][1]()
        num_bytes += 0 if storage is None else storage.nbytes()
    return num_bytes

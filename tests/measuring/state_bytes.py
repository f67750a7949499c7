"""Bytes of the parts of a training's state, counted by storages."""

from torch.distributed.tensor import DTensor


def bytes_of(model, optimizer, part):
    """Return the bytes of the storages of "params", "grads" or "optimizer" on this rank."""
    if part == "optimizer":
        tensors = [value for values in optimizer.state.values() for value in values.values()]
    else:
        tensors = [p if part == "params" else p.grad for p in model.parameters()]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors if each is not None]
    return sum(each.untyped_storage().nbytes() for each in local)

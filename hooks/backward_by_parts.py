"""Prepares parameter groups for a backward that computes the gradients of inputs and of weights apart.

[Note: Backwards by parts]
Zero bubble schedules of `torch.distributed.pipelining` compute the gradients of a part's inputs first. Later, in
another call of autograd, they compute those of its weights, and add them to `weight.grad` themselves. FSDP2 has no hook
there. With FSDP2 alone (torch 2.13) two errors occur without a word:

* The schedule takes the weights from `part.parameters()` before it computes the gradients of inputs. If a forward has
  resharded its units, these are the sharded parameters, which autograd does not know, and all gradients of weights are
  lost. So groups whose forward awaits its backward are unsharded first. `set_reshard_after_backward(False)` leaves them
  unsharded after the backward.
* The schedule adds micro-batches in the dtype of the unsharded weights, bf16 or fp16. FSDP2 casts such a sum to the
  accumulation dtype only when the backward of a unit ends. So gradients that the weights have are added to the sum in
  the accumulation dtype before the schedule adds the next ones.

Before each backward, whole or of one part, torch calls `set_reshard_after_backward(False)` and then
`set_requires_gradient_sync(False)` on the part. `wrapping/fsdp_methods.py` calls `prepare` in the second one.
"""

from collections.abc import Iterable

from torch.distributed.fsdp import FSDPModule

from zeroamp.hooks.group_gradients import GroupGradients


def prepare(groups: Iterable[GroupGradients]) -> None:
    """Unshard groups that await a backward, and sum the gradients that they have: see [Note: Backwards by parts]."""
    for each in groups:
        if each.awaits_backward:
            FSDPModule.unshard(each.module)  # its own groups only
        for parameter in each.group.parameters:
            parameter.sum_gradient()

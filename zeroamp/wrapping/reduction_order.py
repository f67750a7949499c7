"""Compares the ranks in each optimizer step of loops without `TrainStep`: order of reductions, hyperparameters.

[Note: An order in a reduction by maximum]
If ranks run different modules, or the same modules in different orders, one rank's gradients of a group are added to
another rank's gradients of another group. If both groups have the same size, torch raises no error. Ranks with other
learning rates, as of a scheduler that got each rank's own metric, would update their shards differently. So each rank
hashes the reductions since its last optimizer step, in their order, and the hyperparameters. `optimizer_hooks.py`
issues an all-reduce by maximum in each optimizer step, which also sends the hash: 8 bytes, and 255 minus each of them.
The maximum of 255 minus a byte is 255 minus the byte's minimum, so all ranks see whether all hashes are equal. Ranks
that differ have the same hash in one of 2^64 steps.
"""

from hashlib import blake2b

from torch import Tensor

from zeroamp.hooks.collectives.collective_calls import CallOrder, IssuedInStep
from zeroamp.hooks.tensors import HostCopy
from zeroamp.policies.errors import StepError
from zeroamp.wrapping.run_alike import Hyperparameters, describe_hyperparameters, differences, is_alike
from zeroamp.wrapping.state import WrapState


def order_bytes(issued: IssuedInStep, hyperparameters: Hyperparameters) -> bytes:
    """Return the bytes that this rank sends: see [Note: An order in a reduction by maximum]."""
    digest = blake2b(issued.reductions.digest() + repr(hyperparameters).encode(), digest_size=8).digest()
    return digest + bytes(255 - each for each in digest)


def compare_orders(state: WrapState, maxima: Tensor, hyperparameters: Hyperparameters) -> None:
    """Raise on all ranks if their hyperparameters, or their orders of reductions since the last step, differ.

    On a CPU this call raises, before the update. On other devices the call of the next step raises, so that the host
    does not wait for the device. Begins the order of the next step.

    Args:
        state: of the wrapped model.
        maxima: 1-D uint8, on the device of the model: the maxima over the ranks of their `order_bytes`.
        hyperparameters: those of the optimizer on this rank.

    Raises:
        StepError: the ranks differ. The text names the hyperparameters or the first reductions that differ.
    """
    issued = state.issued
    of_this_step = HostCopy(maxima), issued.reductions, hyperparameters
    issued.reductions = CallOrder()
    is_late = state.mesh.device_type != "cpu"
    comparison = issued.before if is_late else of_this_step
    if is_late:
        issued.before = of_this_step
    if comparison is None:
        return
    copied, order, compared = comparison
    values = copied.values()
    size = len(values) // 2
    if all(largest + of_complement == 255 for largest, of_complement in zip(values[:size], values[size:], strict=True)):
        return
    when = "The step before this one was wrong: restart" if is_late else "Nothing was updated in this step. Restart"
    settings = describe_hyperparameters(compared)
    if not is_alike(settings, "the comparison of hyperparameters", state.world, maxima.device):
        raise StepError(
            f"The optimizer step {differences(settings, state.world)} Each rank would update its shards with other "
            "values. Set the same on all ranks; average over them the metric of a scheduler such as ReduceLROnPlateau. "
            f"{when} from the last checkpoint."
        )
    raise StepError(
        f"The order in which gradients were reduced {differences(order.describe(), state.world)} Gradients of one "
        "group were added to those of another, because ranks took different paths through the model. Run the same "
        'modules on all ranks, or name those that only some ranks run: "zeroamp": {"optional_units": [...]}. '
        f"{when} from the last checkpoint."
    )

"""Compares the order in which ranks reduced gradients, in loops without `TrainStep`.

[Note: An order in a reduction by maximum]
If ranks run different modules, or the same modules in different orders, one rank's gradients of a group are added to
another rank's gradients of another group. If both groups have the same size, torch raises no error. So each rank hashes
the reductions since its last optimizer step, in their order. `optimizer_hooks.py` issues an all-reduce by maximum in
each optimizer step, which also sends the hash: 8 bytes, and 255 minus each of them. The maximum of 255 minus a byte is
255 minus the byte's minimum, so all ranks see whether all hashes are equal. Two different orders have the same hash in
one of 2^64 steps.
"""

from torch import Tensor

from zeroamp.hooks.collectives.collective_calls import CallOrder, IssuedInStep
from zeroamp.hooks.tensors import HostCopy
from zeroamp.policies.errors import StepError
from zeroamp.wrapping.run_alike import differences
from zeroamp.wrapping.state import WrapState


def order_bytes(issued: IssuedInStep) -> bytes:
    """Return the bytes that this rank sends: see [Note: An order in a reduction by maximum]."""
    digest = issued.reductions.digest()
    return digest + bytes(255 - each for each in digest)


def compare_orders(state: WrapState, maxima: Tensor) -> None:
    """Raise on all ranks if they reduced gradients in different orders since the last optimizer step.

    On a CPU this call raises, before the update. On other devices the call of the next step raises, so that the host
    does not wait for the device. Begins the order of the next step.

    Args:
        state: of the wrapped model.
        maxima: 1-D uint8, on the device of the model: the maxima over the ranks of their `order_bytes`.

    Raises:
        StepError: the orders differ. The text names the first reductions that differ.
    """
    issued = state.issued
    of_this_step = HostCopy(maxima), issued.reductions
    issued.reductions = CallOrder()
    is_late = state.mesh.device_type != "cpu"
    comparison = issued.before if is_late else of_this_step
    if is_late:
        issued.before = of_this_step
    if comparison is None:
        return
    copied, order = comparison
    values = copied.values()
    size = len(values) // 2
    if all(largest + of_complement == 255 for largest, of_complement in zip(values[:size], values[size:], strict=True)):
        return
    when = "The step before this one was wrong: restart" if is_late else "Nothing was updated in this step. Restart"
    raise StepError(
        f"The order in which gradients were reduced {differences(order.describe(), state.world)} Gradients of one "
        "group were added to those of another, because ranks took different paths through the model. Run the same "
        'modules on all ranks, or name those that only some ranks run: "zeroamp": {"optional_units": [...]}. '
        f"{when} from the last checkpoint."
    )

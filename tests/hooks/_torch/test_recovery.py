"""`abandon` waits for FSDP2's streams before it releases the tensors of an abandoned forward or backward."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from zeroamp.hooks._torch import recovery


class _Stream(torch.cpu.Stream):
    """A current stream that records the streams it waits for, and what FSDP2 still held then."""

    def __init__(self, held):
        super().__init__()
        self.waits, self._held = [], held

    def wait_stream(self, stream):
        self.waits.append((stream, self._held()))


def _waits(resets_itself):
    """Return name -> whether the current stream waits for that stream of FSDP2 while its inputs are still held."""
    linear = nn.Linear(4, 4)
    fully_shard(linear)
    linear(torch.ones(1, 4)).sum().backward(retain_graph=True)
    state = linear._get_fsdp_state()
    context = state._comm_ctx
    context.post_forward_order.append("held")  # what both versions of the reset clear
    current = _Stream(lambda: bool(context.post_forward_order))
    original, torch.cpu.current_stream = torch.cpu.current_stream, lambda: current
    reset = type(state).__dict__.get("_reset_iter_state")
    if not resets_itself and reset is not None:
        del type(state)._reset_iter_state  # as on torch 2.11
        context.reduce_scatter_state = None
    try:
        recovery.abandon(linear)
    finally:
        torch.cpu.current_stream = original
        if reset is not None:
            type(state)._reset_iter_state = reset
    assert not context.post_forward_order
    streams = {name: value for name, value in vars(context).items() if isinstance(value, torch.cpu.Stream)}
    return {name: (stream, True) in current.waits for name, stream in streams.items()}


@pytest.mark.parametrize("resets_itself", [True, False])
def test_all_streams_of_fsdp2_are_waited_for_before_anything_is_dropped(ranks2, resets_itself):
    assert ranks2.run(_waits, resets_itself)[0] == dict.fromkeys(
        ["all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream"], True
    )

"""The private names of FSDP2 that undo a forward or backward that raised."""

from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zeroamp.hooks._torch.fsdp import discard_unsharded_gradients, groups_of, release, units_of


def abandon(root: FSDPModule) -> None:
    """Reset FSDP2 after a forward or backward that raised, so that the next forward can run.

    Parameters are resharded, and unsharded gradients are discarded.
    """
    units = list(units_of(cast(nn.Module, root)))
    groups = [group for unit in units for group in groups_of(unit._get_fsdp_state())]
    state: Any = root._get_fsdp_state()
    if not state._state_ctx.all_states:  # before the first forward there is no state to reset, and there are no streams
        return
    _wait_for_streams(state)
    for group in groups:
        _discard_all_gather(group)
    for unit in units:
        release(unit)
    if hasattr(state, "_reset_iter_state"):  # from 2.13 on
        state._reset_iter_state()
    else:
        _reset_iteration(state)
    for unit in units:
        discard_unsharded_gradients(unit)


def _wait_for_streams(state: Any) -> None:
    """Make the current stream wait for all streams of FSDP2, which may still use the tensors that are discarded next.

    Waiting for FSDP2's events is not enough. A reduction that raised after it had sent has recorded no event. On torch
    2.11, FSDP2 has no method that waits for the events of the other reductions.
    """
    current, context = state._device_handle.current_stream(), state._comm_ctx
    streams = [context.all_gather_copy_in_stream, context.all_gather_stream]
    streams += [context.reduce_scatter_stream, context.all_reduce_stream]
    for stream in streams:
        current.wait_stream(stream)


def _discard_all_gather(group: Any) -> None:
    """Wait for an all-gather that was started, and discard it. Copying it out might run out of memory again."""
    result, group._all_gather_result = group._all_gather_result, None
    if result is None:
        return
    if result.all_gather_event is not None:
        group.device_handle.current_stream().wait_event(result.all_gather_event)
    if isinstance(result.all_gather_work, dist.Work):
        result.all_gather_work.wait()


def _reset_iteration(state: Any) -> None:
    state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    for inner in state._state_ctx.all_states:
        idle = type(inner._training_state).IDLE
        inner._training_state = idle
        for group in groups_of(inner):
            group._training_state = idle
            group._post_forward_indices.clear()
            group._partial_reduce_output = group._all_reduce_state = group._post_reduce_event = None

"""The memory that `recover` needs for the collectives that it issues with zeros."""

import pytest
import torch
import torch.distributed as dist

from tests.measuring.storage_peak import StoragePeak
from tests.processes.training import config, wrapped
from zeroamp.recovery.call_log import Call, ZeroBuffers
from zeroamp.wrapping.state import wrap_state

SMALL, LARGE = 2**10, 2**20


def _calls(group, sizes):
    return [Call("all_to_all", "a group", group, torch.float32, numel) for numel in sizes]


def _peaks():
    """Return the bytes of live buffers at each of three calls: small, large, small."""
    state, alive = wrap_state(wrapped("llama_tied", config(3))), []
    original = dist.all_to_all_single
    with StoragePeak(limit=2**40) as peak:
        buffers = ZeroBuffers(_calls(dist.group.WORLD, [SMALL, LARGE, SMALL]), torch.device("cpu"), state=state)
        dist.all_to_all_single = lambda *args, **kwargs: alive.append(peak._num_alive_bytes())
        try:
            buffers.issue()
        finally:
            dist.all_to_all_single = original
    return alive


def test_each_call_has_buffers_of_its_own_size(ranks2):
    assert ranks2.run(_peaks)[0] == [2 * 4 * numel for numel in (SMALL, LARGE, SMALL)]


def _without_memory():
    state, issued = wrap_state(wrapped("llama_tied", config(3))), []
    zeros = torch.zeros

    def limited(numel, **options):
        if numel > SMALL:
            raise torch.OutOfMemoryError("no memory")
        return zeros(numel, **options)

    torch.zeros, original, dist.all_to_all_single = limited, dist.all_to_all_single, lambda *_, **__: issued.append(1)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            ZeroBuffers(_calls(dist.group.WORLD, [SMALL, LARGE]), torch.device("cpu"), state=state).issue()
    finally:
        torch.zeros, dist.all_to_all_single = zeros, original
    return issued


def test_nothing_is_issued_where_memory_for_one_of_the_calls_is_missing(ranks2):
    assert ranks2.run(_without_memory) == [[], []]

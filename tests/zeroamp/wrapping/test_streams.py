"""All uses of memory by FSDP2's streams are ordered, over optimizer steps on CPUs. See `Streams`."""

import pytest
import torch

import zeroamp
from tests.measuring.streams import Event, Stream, Streams
from tests.models.small import batch, loss_of
from tests.processes.training import config, wrapped
from tests.selection import slow_but
from zeroamp.hooks import tensors
from zeroamp.hooks._torch.fsdp import gather_in_background
from zeroamp.hooks.collectives import gradient_reduction

LOW = {"accumulation": 2, "data_types": {"grad_accum_dtype": "bf16"}}
CASES = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3, "threshold": 0},
    "own units": {"stage": 3, "threshold": 1000},
    "accumulation": {"stage": 2, "accumulation": 2},
    "bf16 accumulation": {"stage": 3, "threshold": 0, **LOW},
    "HSDP": {"stage": 2, "accumulation": 2, "mesh_shape": (2, 2)},
    "HSDP, bf16 accumulation": {"stage": 3, "threshold": 0, "mesh_shape": (2, 2), **LOW},
    "stage 0": {"stage": 0, "accumulation": 2},
    "two levels": {"stage": 3, "threshold": 0, "zeroamp": {"ranks_per_node": 2}},
}


def _steps(options, hides=None, records=True):
    """Train as on an accelerator: without background all-gathers, and with retained receive buffers."""
    options = dict(options)
    model = wrapped("llama_untied", mesh_shape=options.pop("mesh_shape", None), cfg=config(**options))
    gather_in_background(model, enable=False)
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    originals = gradient_reduction._is_kept, Stream.wait_event, Stream.wait_stream
    gradient_reduction._is_kept = lambda _device: True
    if hides is not None:
        setattr(Stream, hides, lambda *_: None)
    try:
        with Streams() as streams:
            if not records:
                tensors.has_streams = lambda _device: False
            for index in range(2 * options.get("accumulation", 1)):
                step.backward(loss_of(model, batch("llama_untied", index)))
                step.step()
    finally:
        gradient_reduction._is_kept, Stream.wait_event, Stream.wait_stream = originals
    return streams.races, streams.num_ops


@pytest.mark.parametrize("case", slow_but(list(CASES), "own units"))
def test_all_uses_of_memory_are_ordered(request, case):
    ranks = request.getfixturevalue("ranks4" if case == "two levels" or "mesh_shape" in CASES[case] else "ranks2")
    for races, num_ops in ranks.run(_steps, CASES[case]):
        assert races == []
        assert len(num_ops) >= 3  # compute, reductions, and all-gathers or sums over replicas


@pytest.mark.parametrize("hides", slow_but(["wait_event", "wait_stream"], "wait_event"))
def test_a_missing_wait_is_found(ranks2, hides):
    assert all(races for races, _ in ranks2.run(_steps, CASES["own units"], hides))


@pytest.mark.parametrize("case", slow_but(["HSDP", "HSDP, bf16 accumulation"], "HSDP"))
def test_sums_of_replicas_hold_the_memory_that_they_use(ranks4, case):
    for races, _ in ranks4.run(_steps, CASES[case], None, False):
        assert races


def test_event_and_host():
    with Streams() as streams:
        one, two = Stream(), Stream()
        with torch.cpu.stream(one):
            tensor = torch.ones(4)
            event = Event()
            event.record()
        with torch.cpu.stream(two):
            tensor + 1
            assert len(streams.races) == 1
            event.synchronize()
            tensor + 1
    assert len(streams.races) == 1

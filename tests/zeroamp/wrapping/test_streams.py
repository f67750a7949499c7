"""All uses of memory by FSDP2's streams are ordered, over optimizer steps on CPUs. See `Streams`."""

import pytest
import torch

import zeroamp
from tests.measuring.streams import Stream, Streams
from tests.models.small import batch, loss_of
from tests.processes.training import config, wrapped
from tests.selection import slow_but
from zeroamp.hooks._torch.fsdp import gather_in_background
from zeroamp.hooks.collectives import gradient_reduction
from zeroamp.two_level import nodes

LOW = {"accumulation": 2, "data_types": {"grad_accum_dtype": "bf16"}}
CASES = {
    "own units": {"stage": 3, "threshold": 1000},
    "HSDP, bf16 accumulation": {"stage": 3, "threshold": 0, "mesh_shape": (2, 2), **LOW},
    "stage 0": {"stage": 0, "accumulation": 2},
    "two levels": {"stage": 3, "threshold": 0, "zeroamp": {"ranks_per_node": 2}},
    "two levels, pieces": {"stage": 3, "threshold": 0, "zeroamp": {"ranks_per_node": 2}, "piece": 2**10},
    "two levels, background": {"stage": 3, "in_background": True, "zeroamp": {"ranks_per_node": 2}},
    "hpZ": {"stage": 3, "threshold": 0, "fields": {"hpz_partition_size": 2}, "mesh_shape": (1, 4)},
    "reproducible, stage 3": {"stage": 3, "accumulation": 2, "zeroamp": {"reproducible": True}},
    "prefetch, live": {
        "stage": 3,
        "threshold": 0,
        "fields": {"prefetch_bucket_size": 20_000, "max_live_parameters": 20_000},
    },
    "evaluation, stage 3": {"stage": 3, "before_step": "evaluate"},
    "discarded step, HSDP": {"stage": 2, "accumulation": 2, "before_step": "discard", "mesh_shape": (2, 2)},
    "native fp16, HSDP": {
        "stage": 2,
        "dtype": "float16",
        "mesh_shape": (2, 2),
        "zeroamp": {"reduce_accumulate_dtype": "native"},
    },
}


def _steps(options, *, num_steps=2, hides_waits=False, records=True):
    """Train as on an accelerator: without background all-gathers, and with retained receive buffers."""
    options = dict(options)
    mesh_shape, before_step = options.pop("mesh_shape", None), options.pop("before_step", None)
    in_background = options.pop("in_background", False)
    fields = options.pop("fields", {})
    piece = options.pop("piece", nodes.BYTES_OF_A_PIECE)
    model = wrapped("two_blocks_untied", mesh_shape=mesh_shape, cfg=config(**options), fields=fields)
    gather_in_background(model, enable=in_background)
    step = zeroamp.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    originals = gradient_reduction._is_kept, Stream.wait_event, nodes.BYTES_OF_A_PIECE
    nodes.BYTES_OF_A_PIECE = piece
    gradient_reduction._is_kept = lambda _device: True
    if hides_waits:
        Stream.wait_event = lambda *_: None
    try:
        with Streams() as streams:
            if not records:
                torch.Tensor.record_stream = lambda *_: None
            for index in range(num_steps * options.get("accumulation", 1)):
                step.backward(loss_of(model, batch("two_blocks_untied", index)))
                if before_step == "evaluate":
                    with torch.no_grad():
                        loss_of(model, batch("two_blocks_untied", 9))
                if before_step == "discard" and index == 0:
                    step.zero_grad()
                else:
                    step.step()
    finally:
        gradient_reduction._is_kept, Stream.wait_event, nodes.BYTES_OF_A_PIECE = originals
    return streams.races, streams.num_ops


@pytest.mark.parametrize("case", slow_but(list(CASES), "own units", "HSDP, bf16 accumulation", "two levels"))
def test_all_uses_of_memory_are_ordered(request, case):
    needs_four = "two levels" in case or "mesh_shape" in CASES[case]
    ranks = request.getfixturevalue("ranks4" if needs_four else "ranks2")
    for races, num_ops in ranks.run(_steps, CASES[case]):
        assert races == []
        # Compute, reductions, and all-gathers (which run in that of compute if they are asynchronous) or replicas.
        assert len(num_ops) >= (2 if "background" in case else 3)


def test_a_missing_wait_is_found(ranks2):
    assert all(races for races, _ in ranks2.run(_steps, CASES["own units"], hides_waits=True))


@pytest.mark.parametrize(("ranks", "case"), [("ranks4", "HSDP, bf16 accumulation"), ("ranks2", "own units")])
def test_sums_hold_the_memory_of_other_streams_that_they_use(request, ranks, case):
    """Of replicas, and of own units, whose receive buffers are allocated in the stream of the forward."""
    for races, _ in request.getfixturevalue(ranks).run(_steps, CASES[case], num_steps=1, records=False):
        assert races

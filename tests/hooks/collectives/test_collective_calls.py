"""`IssuedInStep`: the list of what a rank issued, and the error for a collective that the backend ended."""

import torch
import torch.distributed as dist

from zeroamp.hooks.collectives.collective_calls import IssuedInStep, peer_lost
from zeroamp.hooks.collectives.traffic import STEP, IssuedCollective
from zeroamp.policies.errors import PeerError


def _call(name="a", numel=4, dtype=torch.float32, collective="all_gather", op=dist.ReduceOp.SUM):
    return IssuedCollective(collective, torch.empty(numel, dtype=dtype), name, None, op)


def _listed(*calls):
    issued = IssuedInStep()
    for call in calls:
        issued.on_collective(call)
    return tuple(issued.calls)


def test_a_call_is_listed_as_a_text_that_is_the_same_in_every_process():
    gather, reduction = _call(), _call("b", collective="reduce_scatter", op=dist.ReduceOp.AVG)
    assert _listed(gather, reduction, gather) == (
        "all_gather of a (4 elements, fp32)",
        "reduce_scatter of b (4 elements, fp32, AVG)",
        "all_gather of a (4 elements, fp32)",
    )


def test_every_property_of_a_call_and_the_order_change_the_list():
    variants = [
        (),
        (_call(),),
        (_call(), _call()),
        (_call("b"),),
        (_call(numel=5),),
        (_call(dtype=torch.bfloat16),),
        (_call(collective="all_reduce"),),
        (_call(collective="all_reduce", op=dist.ReduceOp.AVG),),
        (_call(), _call("b")),
        (_call("b"), _call()),
    ]
    assert len({_listed(*variant) for variant in variants}) == len(variants)


def test_the_steps_own_collective_is_left_out_and_a_new_step_begins_empty():
    issued = IssuedInStep()
    issued.on_collective(_call(STEP))
    assert issued.calls == []
    issued.on_collective(_call())
    issued.num_backwards = 1
    calls = issued.calls
    issued.end_step()
    assert (issued.step, issued.num_backwards, issued.calls) == (2, 0, [])
    assert len(calls) == 1, "what was issued is left to who holds it"


def test_an_error_of_this_rank_itself_is_left_alone():
    for error in (torch.OutOfMemoryError("no memory"), RuntimeError("shape"), PeerError("gloo")):
        assert peer_lost(error, _call()) is error


def test_an_error_of_the_backend_names_the_collective_and_the_place(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    issued = IssuedInStep(step=3, num_backwards=2)
    errors = [RuntimeError("[gloo/transport/tcp/pair.cc:1] Timed out"), dist.DistBackendError("NCCL timeout")]
    for error in (*errors, RuntimeError("Application timeout caused pair closure")):
        text = str(peer_lost(error, None, [issued]))
        assert "the collective of FSDP2 in optimizer step 3, where 2 backwards had begun" in text
        assert str(error) in text
        issued.on_collective(_call())
        assert "in optimizer step 3 after the all_gather of a (4 elements, fp32)" in str(
            peer_lost(error, None, [issued])
        )
        issued.calls.clear()


def _of_one_gpu():
    error = dist.DistBackendError("Duplicate GPU detected : rank 0 and rank 1")
    return str(peer_lost(error, _call()))


def test_two_ranks_on_one_gpu_are_named_as_such(ranks2):
    for rank, text in enumerate(ranks2.run(_of_one_gpu)):
        assert text.startswith(f"Rank {rank} uses the same GPU as another rank of its host: Duplicate GPU detected")
        assert "call torch.cuda.set_device before anything uses a GPU" in text

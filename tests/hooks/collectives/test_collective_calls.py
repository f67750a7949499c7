"""`IssuedInStep`: the list of what a rank issued, and the error for a collective that the backend ended."""

import logging
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeroamp
from tests.measuring.logs import log_lines
from tests.models.small import batch, build
from tests.processes.training import config
from zeroamp.hooks.collectives import collective_calls
from zeroamp.hooks.collectives.collective_calls import MOST_LISTED, IssuedInStep, NamedWork, peer_lost
from zeroamp.hooks.collectives.traffic import STEP, IssuedCollective
from zeroamp.policies.errors import PeerError


def _call(name="a", collective="all_gather", op=dist.ReduceOp.SUM):
    return IssuedCollective(collective, torch.empty(4), name, None, op)


def _issued(*calls):
    issued = IssuedInStep(is_counted=True)
    for call in calls:
        issued.on_collective(call)
    return issued


def test_calls_are_listed_and_a_new_step_begins_empty():
    """All but the collective of the optimizer step itself; reductions are listed apart."""
    reduction = _call("b", "reduce_scatter", dist.ReduceOp.AVG)
    issued = _issued(_call(), reduction, _call(STEP))
    calls = issued.calls
    assert calls.first == ["all_gather of a (4 elements, fp32)", "reduce_scatter of b (4 elements, fp32, AVG)"]
    assert issued.reductions.first == calls.first[1:]
    issued.num_backwards = 1
    issued.end_step()
    assert (issued.step, issued.num_backwards, issued.calls.first, issued.reductions.first) == (2, 0, [], [])
    assert len(calls.first) == 2, "what was issued is left to who holds it"


def test_the_hash_tells_orders_apart_and_forgets_nothing():
    orders = [(_call("a"), _call("b")), (_call("b"), _call("a")), (_call("a"),), (_call("a"), _call("b"), _call("b"))]
    assert len({_issued(*calls).calls.digest() for calls in orders}) == len(orders)
    assert _issued(*orders[0]).calls.digest() == _issued(*orders[0]).calls.digest()


def test_an_evaluation_of_any_length_does_not_fill_the_list():
    """The hash and the count go on, the texts end."""
    calls = _issued(*[_call()] * (3 * MOST_LISTED)).calls
    assert len(calls.first) == MOST_LISTED
    assert calls.describe()["the number of collectives"] == str(3 * MOST_LISTED)
    assert calls.digest() != _issued(*[_call()] * (3 * MOST_LISTED - 1)).calls.digest()


def test_an_error_of_this_rank_itself_is_left_alone():
    for error in (torch.OutOfMemoryError("no memory"), RuntimeError("shape"), PeerError("gloo")):
        assert peer_lost(error, _call()) is error


def test_an_error_of_the_backend_names_the_collective_and_the_place(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    issued = IssuedInStep(step=3, num_backwards=2, is_counted=True)
    errors = [RuntimeError("[gloo/transport/tcp/pair.cc:1] Timed out"), dist.DistBackendError("NCCL timeout")]
    for error in (*errors, RuntimeError("Application timeout caused pair closure")):
        text = str(peer_lost(error, None, [issued]))
        assert "the collective of FSDP2 in optimizer step 3, where 2 backwards had begun" in text
        assert str(error) in text
        assert "no rank may skip a block that others run, also not at random (LayerDrop, stochastic depth)" in text
    issued.on_collective(_call())
    after = str(peer_lost(errors[0], None, [issued]))
    assert "in optimizer step 3 after the all_gather of a (4 elements, fp32)" in after


def _of_one_gpu():
    return str(peer_lost(dist.DistBackendError("Duplicate GPU detected : rank 0 and rank 1"), _call()))


def test_two_ranks_on_one_gpu_are_named_as_such(ranks2):
    for rank, text in enumerate(ranks2.run(_of_one_gpu)):
        assert text.startswith(f"Rank {rank} uses the same GPU as another rank of its host: Duplicate GPU detected")
        assert "call torch.cuda.set_device before anything uses a GPU" in text


class _Work:
    """A work whose first waits raise."""

    def __init__(self, *errors, completed=False):
        self.errors, self.completed, self.timeouts = list(errors), completed, []

    def wait(self, *timeouts):
        self.timeouts.append(timeouts)
        if self.errors:
            raise self.errors.pop(0)
        return True

    def is_completed(self):
        return self.completed


def test_only_a_wait_without_a_timeout_on_a_cpu_is_watched():
    """Another device's wait, and that of a caller who passes a timeout, are as they were. A failure is no wait."""
    call, on_device = _call(), _call()._replace(tensor=torch.empty(4, device="meta"))
    for issued, given in ((on_device, ()), (call, (timedelta(seconds=1),))):
        assert NamedWork(work := _Work(), issued, ()).wait(*given)
        assert work.timeouts == [given]
        with pytest.raises(RuntimeError, match="timed out"):
            NamedWork(_Work(RuntimeError("timed out")), issued, ()).wait(*given)
    assert NamedWork(work := _Work(), call, ()).wait()
    assert work.timeouts == [(collective_calls.WARN_AFTER,)]
    failed = _Work(RuntimeError("shape"), RuntimeError("shape"), completed=True)
    with log_lines() as lines, pytest.raises(RuntimeError, match="shape"):
        NamedWork(failed, call, ()).wait()
    assert lines == []


def _enters_late(late, per_node):
    """Whether two evaluations are equal, the first of which the rank `late` enters after the WARNING of its partner."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    cfg = config(3, zeroamp={"ranks_per_node": per_node})
    model, inputs = zeroamp.wrap_model(build("llama_tied"), cfg), batch("llama_tied", rank)
    handler = logging.Handler()
    handler.emit = lambda _record: store.set("warned", "")
    with mock.patch.object(collective_calls, "WARN_AFTER", timedelta(milliseconds=20)), log_lines() as lines:
        if rank == late:
            store.wait(["warned"], timedelta(seconds=20))
        elif rank == 1 - late:
            logging.getLogger("zeroamp.rank").addHandler(handler)
        try:
            with torch.no_grad():
                first = model(inputs)
        finally:
            logging.getLogger("zeroamp.rank").removeHandler(handler)
        dist.barrier()
        with torch.no_grad():
            second = model(inputs)
    return torch.equal(first, second), lines


@pytest.mark.parametrize("late", [0, 1])
def test_a_long_wait_is_named_and_goes_on(ranks2, late):
    """Also on another rank than the first, which alone logs all other messages."""
    found = ranks2.run(_enters_late, late, "off")
    assert [same_bits for same_bits, _ in found] == [True, True]
    text = found[1 - late][1][0]
    assert text.startswith(f"Rank {1 - late} has waited 0.02 s for the all_gather of ")
    assert "over ranks 0, 1. It waits on" in text
    assert "every rank must run the same ones, and evaluate, generate and save" in text
    assert all("all_gather" in line for _, lines in found for line in lines)


def test_a_long_wait_inside_a_node_is_named(ranks4):
    found = ranks4.run(_enters_late, 1, 2)
    assert [same_bits for same_bits, _ in found] == [True] * 4
    assert any(line.startswith("Rank 0 has waited") for line in found[0][1])

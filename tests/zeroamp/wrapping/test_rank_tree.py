"""Messages along the tree: values, connections, and what the ranks that are left learn of a lost one."""

import os
import signal
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zeroamp
from tests.processes import ranks as rank_processes
from tests.processes.ranks import Ranks
from tests.selection import slow_but
from zeroamp.hooks._torch.gloo import new_lazy_group
from zeroamp.wrapping.rank_group import RankGroup
from zeroamp.wrapping.rank_tree import LostRankError, RankTree, _is_below, _pack, _unpack


def _messages():
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    tree = RankTree(new_lazy_group(range(num_ranks), timedelta(seconds=30), is_local=False))
    large = "x" * 10_000
    gathered = tree.gather(f"of {rank}")
    error = LostRankError("gone") if rank == 0 else None
    with pytest.raises(LostRankError, match="gone"):
        tree.broadcast(error)
    with pytest.raises(LostRankError, match="gone"):
        tree.scatter(error or [])
    return (
        tree.max([rank, -rank, 7 if rank == 3 else 0, -(2**62)]),
        gathered,
        tree.all_gather((rank, large))[-1] == (num_ranks - 1, large),
        tree.broadcast(rank + 5),
        tree.scatter([10 * number for number in range(num_ranks)] if rank == 0 else []),
    )


def test_values_go_up_and_down_the_tree(ranks4):
    for rank, (largest, gathered, is_whole, broadcast, scattered) in enumerate(ranks4.run(_messages)):
        assert largest == [3, 0, 7, -(2**62)]
        assert gathered == ([f"of {each}" for each in range(4)] if rank == 0 else [])
        assert (is_whole, broadcast, scattered) == (True, 5, 10 * rank)


def test_a_rank_is_below_its_parent_and_the_root():
    assert [rank for rank in range(15) if _is_below(rank, 2)] == [2, 5, 6, 11, 12, 13, 14]
    assert all(_is_below(rank, 0) for rank in range(15))


def test_large_messages_are_compressed():
    plan = [("model.layers.0.weight", index % 7) for index in range(2000)]
    assert _unpack(_pack(plan)) == plan
    assert len(_pack(plan)) < len(repr(plan)) / 10


def _num_sockets():
    found = 0
    for file in os.scandir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            found += os.readlink(file.path).startswith("socket:")
    return found


def _sockets_of_two_groups():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    before = _num_sockets()
    groups = [RankGroup.for_saving(mesh), RankGroup.for_signals(mesh)]
    dist.barrier()
    made = _num_sockets() - before
    for ranks in groups:
        ranks.run(dist.get_rank)
        ranks.reduce_scatter(dist.get_rank, lambda values: values)
        assert ranks.is_equal("x")
    dist.barrier()
    return made, _num_sockets() - before


def test_a_rank_has_a_listening_socket_and_three_connections_per_group_at_most(ranks4):
    found = ranks4.run(_sockets_of_two_groups)
    assert [made for made, _ in found] == [0] * 4
    neighbours = [2, 2, 1, 1]
    assert [used for _, used in found] == [2 * (1 + number) for number in neighbours]


def _digests():
    ranks = RankGroup(init_device_mesh("cpu", (dist.get_world_size(),)))
    rank, equal = dist.get_rank(), {"a": [1.5, "b"]}
    before = ranks.tree.num_bytes_sent
    results = ranks.run(lambda: equal)
    sent = ranks.tree.num_bytes_sent - before
    shards = {rank % 2: "differs" if rank == 2 else f"shard {rank % 2}"}
    return (
        results == [equal] * 4,
        sent,
        [ranks.is_equal("same"), ranks.is_equal(rank)],
        ranks.are_equal(["same", rank, None]),
        ranks.are_equal(shards, 2),
        ranks.reduce(lambda: rank, sum),
        ranks.reduce_scatter(lambda: rank, lambda values: [value + 1 for value in values]),
    )


def test_equal_values_are_compared_and_not_sent(ranks4):
    for rank, found in enumerate(ranks4.run(_digests)):
        assert found == (True, 0, [True, False], [True, False, True], [False, True], 6, rank + 1)


def _fails_while_combining():
    ranks = RankGroup(init_device_mesh("cpu", (dist.get_world_size(),)))
    texts = []
    for action, combine in ((_raises_on_second, sum), (dist.get_rank, _raises)):
        for method in (ranks.reduce, ranks.reduce_scatter):
            with pytest.raises(zeroamp.CheckpointError) as raised:
                method(action, combine)
            texts.append(str(raised.value))
    return texts


def _raises_on_second():
    if dist.get_rank() == 1:
        raise OSError("full")


def _raises(_values):
    raise ValueError("no sum")


def test_an_error_of_a_rank_or_of_the_first_is_raised_on_all(ranks2):
    expected = ["rank 1: OSError: full"] * 2 + ["rank 0: ValueError: no sum"] * 2
    assert ranks2.run(_fails_while_combining) == [expected] * 2


GRACE_S = 10
"""Within which the ranks that are left must have answered."""


def _lost(folder, which, timeout_s, is_connected):
    """One rank is killed before or after the ranks have connected. The others note what they learn."""
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    ranks, rank = RankGroup(DeviceMesh.from_group(group, "cpu")), dist.get_rank()
    if is_connected:
        ranks.run(dist.get_rank)
    if rank == which:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(zeroamp.CheckpointError) as raised:
        ranks.run(dist.get_rank)
    (folder / str(rank)).write_text(str(raised.value))
    time.sleep(1)  # so that none learns of it from the end of another
    raise raised.value


def _texts(folder, monkeypatch, which, timeout_s, *, is_connected):
    """Rank -> the text of its error, of the ranks that were not killed."""
    monkeypatch.setattr(rank_processes, "GRACE_S", GRACE_S)
    ranks = Ranks(4)
    with pytest.raises(AssertionError):
        ranks.run(_lost, folder, which, timeout_s, is_connected)
    ranks.stop()
    return {rank: (folder / str(rank)).read_text() for rank in set(range(4)) - {which}}


@pytest.mark.parametrize("which", slow_but([0, 1, 3], 1))
def test_all_ranks_learn_of_a_lost_one_at_once(tmp_path, monkeypatch, which):
    for rank, text in _texts(tmp_path, monkeypatch, which, 6 * GRACE_S, is_connected=True).items():
        assert f"failed on rank {rank}: rank {which} is lost or did not answer" in text


@pytest.mark.slow
@pytest.mark.parametrize("which", [1, 3])  # the first rank holds the store that a group is made with
def test_ranks_that_have_not_connected_wait_for_the_timeout_and_no_longer(tmp_path, monkeypatch, which):
    for rank, text in _texts(tmp_path, monkeypatch, which, GRACE_S / 4, is_connected=False).items():
        assert f"failed on rank {rank}: rank " in text

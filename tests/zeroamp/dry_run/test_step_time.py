"""Times of collectives by hand: 8 GPUs per node, 400 GB/s inside, 50 GB/s per GPU outside."""

from dataclasses import replace

import pytest

from zeroamp.dry_run.network import Network

NETWORK = Network(gpus_per_node=8, intra_gb_per_s=400, inter_gb_per_s=50, efficiency=0.5)
GB = 10**9


# NCCL's microseconds, src/graph/tuning.cc: Simple 8.4 per call, 3.4 and 14 per hop (NVLink, network); LL128 14, 1.9, 4,
# with 120 of 128 bytes.
LL128 = 120 / 128


@pytest.mark.parametrize(
    ("collective", "num_ranks", "stride", "microseconds", "seconds"),
    [
        ("all_gather", 8, 1, 8.4 + 7 * 3.4, 7 / 8 / 200),  # inside the node
        ("reduce_scatter", 8, 1, 8.4 + 7 * 3.4, 7 / 8 / 200),
        ("all_reduce", 8, 1, 8.4 + 14 * 3.4, 2 * 7 / 8 / 200),
        # Eight cards of 50 are as fast as the links inside.
        ("all_gather", 32, 1, 8.4 + 28 * 3.4 + 3 * 14, 31 / 32 / 200),
        ("all_reduce", 4, 8, 8.4 + 6 * 14, 2 * 3 / 4 / 25),  # one rank of each node
        ("all_reduce", 4, 4, 8.4 + 4 * 3.4 + 2 * 14, 2 * 3 / 4 / 50),  # two ranks of each node
        ("all_reduce", 2, 4, 8.4 + 2 * 3.4, 2 * 1 / 2 / 200),
        ("all_to_all", 8, 1, 8.4 + 3.4, 7 / 8 / 200),
        ("all_to_all", 32, 1, 8.4 + 3.4 + 3 * 14, 24 / 32 / 25),  # to 24 ranks outside, through its own card
        ("all_gather", 1, 1, 0, 0),
    ],
)
def test_the_time_of_one_gigabyte(collective, num_ranks, stride, microseconds, seconds):
    latency, of_bytes = NETWORK.parts(collective, GB, num_ranks, stride)
    assert latency == pytest.approx(microseconds * 1e-6, rel=1e-12)
    assert of_bytes == pytest.approx(seconds, rel=1e-12)
    assert NETWORK.seconds(collective, GB, num_ranks, stride) == latency + of_bytes


def test_slow_cards_slow_a_ring_down():
    slow = Network(gpus_per_node=8, intra_gb_per_s=400, inter_gb_per_s=10, efficiency=1.0)
    assert slow.parts("all_gather", GB, 16)[1] == pytest.approx(15 / 16 / 80, rel=1e-12)


@pytest.mark.parametrize(("num_nodes", "microseconds"), [(1, 14 + 1.9 * 7), (128, 14 + 1.9 * 896 + 4 * 127)])
def test_the_latency_of_a_ring_is_that_of_the_faster_protocol(num_nodes, microseconds):
    """128 nodes: 2.2 ms by LL128. By Simple it would be 4.8 ms."""
    latency, seconds = NETWORK.parts("all_gather", 1000, 8 * num_nodes)
    assert latency == pytest.approx(microseconds * 1e-6, rel=1e-12)
    assert seconds < 1e-7


def test_2048_nodes_take_35_milliseconds_per_gather():
    assert NETWORK.parts("all_gather", 0, 16384)[0] == pytest.approx((14 + 1.9 * 14336 + 4 * 2047) * 1e-6, rel=1e-12)
    assert NETWORK.parts("all_gather", 0, 16384)[0] == pytest.approx(35.4e-3, rel=1e-2)


def test_an_all_reduce_over_many_replicas_is_a_tree():
    """2048 replicas, one per node: 11 levels up and down, not 4094 hops."""
    latency, seconds = NETWORK.parts("all_reduce", GB / 1000, 2048, stride=8)
    assert latency == pytest.approx((14 + 22 * 8.5) * 1e-6, rel=1e-12)
    assert seconds == pytest.approx(2 / 1000 / 25 / 0.9 / LL128, rel=1e-12)


def test_pcie_has_its_own_hops_and_no_ll128():
    slow = Network(gpus_per_node=8, intra_gb_per_s=32, inter_gb_per_s=25, efficiency=1.0)
    assert slow.parts("all_gather", 0, 64)[0] == pytest.approx((8.4 + 56 * 5.7 + 7 * 14) * 1e-6, rel=1e-12)


TWO_LEVELS = replace(NETWORK, ranks_per_node=8)


@pytest.mark.parametrize(("nodes", "flat_gb", "two_gb"), [(2, 8.0, 2.0), (8, 14.1, 3.5), (128, 15.9, 4.0)])
def test_bytes_of_a_card_in_two_levels(nodes, flat_gb, two_gb):
    """LLaMA-3 8B, B = 16.1 GB of bf16: flat B (n - g) / n, in two levels 2 B / g (m - 1) / m."""
    num_bytes, inside = 16.06e9, 7 / 8 * 16.06e9 / 200e9
    flat = NETWORK.reduce_parts("all_to_all", num_bytes, 2, 8 * nodes)[1]
    two = TWO_LEVELS.reduce_parts("all_to_all", num_bytes, 2, 8 * nodes)[1]
    assert flat * 25 == pytest.approx(flat_gb, rel=0.01)
    assert (two - inside) * 25 == pytest.approx(two_gb, rel=0.02)
    assert TWO_LEVELS.reduce_parts("all_to_all", num_bytes, 2, 8 * nodes)[0] == pytest.approx(
        (8.4 + 3.4 + 8.4 + -(-(nodes - 1) // 8) * 14) * 1e-6, rel=1e-12
    )


def test_a_gather_in_two_levels_makes_as_many_hops_as_nodes_and_ranks_of_a_node():
    latency, seconds = TWO_LEVELS.gather_parts(GB, 64)
    between, inside = (8.4 + 7 * 14, 1 / 8 * 7 / 8 / 25), (8.4 + 7 * 3.4, 7 / 8 / 200)
    assert latency == pytest.approx((between[0] + inside[0]) * 1e-6, rel=1e-12)
    assert seconds == pytest.approx(between[1] + inside[1], rel=1e-12)
    assert TWO_LEVELS.gather_parts(GB, 8) == NETWORK.gather_parts(GB, 8), "one node has one level"
    assert TWO_LEVELS.reduce_parts("reduce_scatter", GB, 4, 64) == NETWORK.reduce_parts("reduce_scatter", GB, 4, 64)


def test_bytes_of_the_own_sum():
    """2.5 bytes per bf16 element over 8 ranks; in two levels the partial sums of 4 bytes are written and read too."""
    assert NETWORK.sum_bytes("all_to_all", 2000, 2, 8) == 2500
    assert NETWORK.sum_bytes("all_to_all", 2000, 2, 64) == 2000 + 1000 * 4 / 64
    assert TWO_LEVELS.sum_bytes("all_to_all", 2000, 2, 64) == 2000 + 1000 * (8 / 8 + 4 / 64)
    assert NETWORK.sum_bytes("reduce_scatter", 2000, 2, 8) == 0


def test_memory_of_nccl():
    """8 x H100: 1.06 GB before the first all-to-all, 4.34 GB after it."""
    of = {"num_replicas": 1, "num_partitions": 0, "separate": False}
    assert NETWORK.nccl_bytes(num_shards=8, all_to_all=False, **of) == 1_060_000_000
    assert NETWORK.nccl_bytes(num_shards=8, all_to_all=True, **of) == pytest.approx(4.34e9, rel=5e-3)
    assert NETWORK.nccl_bytes(num_shards=1, all_to_all=True, **of) == 0
    of = {"num_replicas": 2, "num_partitions": 1, "separate": True}
    assert NETWORK.nccl_bytes(num_shards=8, all_to_all=False, **of) == 2_560_000_000
    assert TWO_LEVELS.nccl_bytes(num_shards=16, all_to_all=False, **of) == 3_060_000_000

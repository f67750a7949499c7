"""Times of collectives by hand: 8 GPUs per node, 400 GB/s inside, 50 GB/s per GPU outside."""

import pytest

from zeroamp.dry_run.step_time import Network

NETWORK = Network(gpus_per_node=8, intra_gb_per_s=400, inter_gb_per_s=50, efficiency=0.5)
GB = 10**9


@pytest.mark.parametrize(
    ("collective", "num_ranks", "stride", "seconds"),
    [
        ("all_gather", 8, 1, 7 / 8 / 200),  # inside the node
        ("reduce_scatter", 8, 1, 7 / 8 / 200),
        ("all_reduce", 8, 1, 2 * 7 / 8 / 200),
        ("all_gather", 32, 1, 31 / 32 / 200),  # eight cards of 50 are as fast as the links inside
        ("all_reduce", 4, 8, 2 * 3 / 4 / 25),  # one rank of each node
        ("all_reduce", 4, 4, 2 * 3 / 4 / 50),  # two ranks of each node
        ("all_reduce", 2, 4, 2 * 1 / 2 / 200),
        ("all_to_all", 8, 1, 7 / 8 / 200),
        ("all_to_all", 32, 1, 24 / 32 / 25),  # to 24 ranks outside, through its own card
        ("all_gather", 1, 1, 0),
    ],
)
def test_the_time_of_one_gigabyte(collective, num_ranks, stride, seconds):
    assert NETWORK.seconds(collective, GB, num_ranks, stride) == pytest.approx(seconds, rel=1e-12)


def test_slow_cards_slow_a_ring_down():
    slow = Network(gpus_per_node=8, intra_gb_per_s=400, inter_gb_per_s=10, efficiency=1.0)
    assert slow.seconds("all_gather", GB, 16) == pytest.approx(15 / 16 / 80, rel=1e-12)

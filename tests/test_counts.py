"""What `benchmarks/counts.py` counts under fake ranks does not grow with them."""

import pytest

from benchmarks.counts import PARTITION, collectives_of_steps, groups_made
from tests.selection import slow_but


@pytest.mark.parametrize("num_ranks", slow_but([16, 64, 1024], 64))
def test_all_units_share_two_process_groups_of_a_secondary_partition(num_ranks):
    made = [groups_made(num_ranks, num_blocks, zero_hpz_partition_size=PARTITION) for num_blocks in (2, 3)]
    assert made == [2, 2]
    assert groups_made(num_ranks, 2) == 0


def test_a_step_has_no_collective_besides_its_one_all_reduce(tmp_path):
    assert collectives_of_steps(64, str(tmp_path)) == (0, 0)

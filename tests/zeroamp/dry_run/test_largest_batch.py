"""The largest batch is the one that trying them all would find."""

import random

import pytest

from zeroamp.dry_run.gpu_memory import MAX_BATCH, largest_batch


@pytest.mark.parametrize("seed", range(5))
def test_it_is_what_trying_all_of_them_finds(seed):
    generator = random.Random(seed)
    lines = [(generator.randint(0, 1000), generator.randint(1, 50)) for _ in range(4)]

    def peak(batch):
        return max(constant + slope * batch for constant, slope in lines)

    limit = generator.randint(100, 5000)
    found = largest_batch(peak, limit)
    assert found == max((batch for batch in range(1, 6000) if peak(batch) <= limit), default=0)


def test_few_batches_are_tried():
    tried = []
    assert largest_batch(lambda batch: tried.append(batch) or 100 + 7 * batch, 10_000) == 1414
    assert tried == [1, 2, 1414, 1415]


@pytest.mark.parametrize(("exponent", "most"), [(2, 6), (3, 18)])
def test_few_batches_are_tried_for_a_loss_of_all_pairs(exponent, most):
    tried = []
    found = largest_batch(lambda batch: tried.append(batch) or 10**6 + 7 * batch + 4 * batch**exponent, 8 * 10**10)
    assert 4 * found**exponent < 8 * 10**10 < 2 * 10**6 + 4 * (found + 1) ** exponent
    assert len(tried) <= most


def test_few_batches_are_tried_where_a_flat_peak_rises():
    tried = []

    def peak(batch):
        tried.append(batch)
        return max(77_995_537_534, 2_419_609_938 + 760_185_468 * batch)

    assert largest_batch(peak, 78 * 10**9) == 99
    assert len(tried) < 2 * MAX_BATCH.bit_length()  # at least every second guess halves what is left


def test_memory_that_does_not_grow_ends_at_the_largest_number():
    assert largest_batch(lambda _batch: 5, 10) == MAX_BATCH
    assert largest_batch(lambda _batch: 11, 10) == 0

"""The exact sum, whose bits do not depend on order, grouping or ranks; and sums in the order of the tree."""

import itertools
from fractions import Fraction

import pytest
import torch

from tests.oracles.one_process import tree
from zeroamp.reproducible.exact_sum import NUM_NUMBERS, ExactSum, total_of
from zeroamp.reproducible.tree_sums import TreeSum

CPU = torch.device("cpu")


def _total(ranks, *, squares):
    """The total of numbers on several ranks: ranks[rank] is a list of tensors."""
    numbers = torch.zeros(NUM_NUMBERS, dtype=torch.float64)
    for tensors in ranks:
        part = ExactSum(CPU, squares=squares)
        part.add(tensors)
        numbers += part.numbers()
    return total_of(numbers).item()


def _values(scale, num=100_001):
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(num, generator=generator)
    return (normal * torch.exp(8 * torch.randn(num, generator=generator)) * scale).nan_to_num(0, 3e38, -3e38)


@pytest.mark.parametrize("squares", [True, False])
@pytest.mark.parametrize("scale", [1, 1e30, 1e-44])
def test_the_sum_is_the_same_for_every_grouping(scale, squares):
    """The sum is the same for every grouping and is the exact one rounded."""
    values = _values(scale)
    exact = sum(Fraction(value) ** (1 + squares) for value in values.double().tolist())
    generator = torch.Generator().manual_seed(1)
    totals = set()
    for num_ranks, size in ((1, 200_000), (2, 70_000), (3, 1_000), (8, 37)):
        shuffled = values[torch.randperm(len(values), generator=generator)]
        totals.add(_total([list(rank.split(size)) for rank in shuffled.chunk(num_ranks)], squares=squares))
    (total,) = totals
    # Three parts are added: at most two roundings to 2^-53 beside the slices that were cut off.
    assert abs(Fraction(total) - exact) <= abs(exact) * Fraction(1, 2**51) + Fraction(1, 2**1000)


def test_terms_that_cancel_are_cut_off_alike_by_all_groupings():
    # The two large terms cut off the small ones, also where another rank holds these.
    numbers = torch.tensor([1e30, -1e30, 1e-10, 3.0])
    assert _total([[numbers]], squares=False) == 0
    assert _total([[numbers[:1]], [numbers[1:2]], [numbers[2:]]], squares=False) == 0


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_term_that_is_not_finite_makes_the_sum_nan(value):
    finite = [torch.ones(3)]
    total = _total([finite, [torch.tensor([1.0, value])], finite], squares=True)
    assert total != total


def _terms(num):
    generator = torch.Generator().manual_seed(num)
    return [torch.randn(50, generator=generator) * 10 ** float(i % 5) for i in range(num)]


@pytest.mark.parametrize("num", [*range(1, 10), 16, 31, 33])
def test_the_sum_has_the_bits_of_the_tree(num):
    terms, total = _terms(num), TreeSum()
    most = 0
    for number, term in enumerate(terms):
        total.add(number, term.clone())
        most = max(most, len(total.partial))
    assert torch.equal(total.total(), tree(terms))
    assert most <= 1 + num.bit_length()


@pytest.mark.parametrize("num", [5, 8])
def test_terms_that_are_missing_count_as_zeros(num):
    terms = _terms(num)
    for present in itertools.product((False, True), repeat=num):
        if not any(present):
            continue
        total = TreeSum()
        for number, (term, is_there) in enumerate(zip(terms, present, strict=True)):
            if is_there:
                total.add(number, term.clone())
        zero = torch.zeros(50)
        expected = tree([term if is_there else zero for term, is_there in zip(terms, present, strict=True)])
        assert torch.equal(total.total(), expected), present

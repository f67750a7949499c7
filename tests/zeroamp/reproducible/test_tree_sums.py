"""Sums over micro-batches in the order of the tree, against the tree written out."""

import itertools

import pytest
import torch

from tests.oracles.one_process import tree
from zeroamp.reproducible.tree_sums import TreeSum


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

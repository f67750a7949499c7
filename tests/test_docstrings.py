"""The examples in docstrings of public names run, and give what they show, on every rank of two."""

import doctest

import pytest
import torch
from torch import nn

import zeroamp

MUST = ("wrap_model", "policy_from_config", "TrainStep", "explain", "plan_run", "save_checkpoint", "RunReport")
EXAMPLES = [name for name in zeroamp.__all__ if ">>> " in (getattr(zeroamp, name).__doc__ or "")]


def _failures(name, folder):
    torch.manual_seed(0)
    names = {"zeroamp": zeroamp, "torch": torch, "nn": nn, "folder": folder}
    value, texts = getattr(zeroamp, name), []
    (test,) = (
        test for test in doctest.DocTestFinder(recurse=False).find(value, name, globs=names) if test.name == name
    )
    doctest.DocTestRunner(verbose=False).run(test, out=texts.append)
    return len(test.examples), "".join(texts)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_gives_what_it_shows(ranks2, tmp_path, name):
    for num_examples, text in ranks2.run(_failures, name, str(tmp_path)):
        assert text == ""
        assert num_examples > 1


def test_the_names_that_every_run_uses_have_examples():
    assert set(MUST) <= set(EXAMPLES)

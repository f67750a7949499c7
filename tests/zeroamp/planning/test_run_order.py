"""In which order units run, read off the module tree."""

import torch
from torch import nn

from zeroamp.planning.run_order import UnitRun, run_order


def block():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))


def names(run):
    return (run.unit, *(names(inner) for inner in run.inner))


def test_units_in_units_and_units_that_are_registered_twice():
    shared = block()
    model = nn.Sequential(block(), shared, nn.ModuleList([shared, block()]))
    run = run_order(model, ["0.1", "0", "1", "2.1"])
    assert names(run) == ("", ("0", ("0.1",)), ("1",), ("1",), ("2.1",))
    assert run.forward_order() == ["", "0", "0.1", "1", "2.1"]
    assert run.backward_order() == ["", "2.1", "1", "0", "0.1"]


def test_a_name_that_begins_like_another_is_not_inside_it():
    model = nn.ModuleDict({"a": block(), "ab": block()})
    assert names(run_order(model, ["a", "ab"])) == ("", ("a",), ("ab",))


def flags(run: UnitRun):
    return run.unit, run.input_requires_grad, run.output_requires_grad


def test_a_backward_reaches_what_comes_after_the_first_trainable_parameter():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    model.requires_grad_(False)
    model[1].requires_grad_(True)
    run = run_order(model, ["0", "1", "3"])
    assert flags(run) == ("", False, True)
    assert [flags(inner) for inner in run.inner] == [("0", False, False), ("1", False, True), ("3", True, True)]
    model[1].requires_grad_(False)
    model[3].requires_grad_(True)
    run = run_order(model, ["0", "1", "3"])
    assert [flags(inner) for inner in run.inner] == [("0", False, False), ("1", False, False), ("3", False, True)]


def test_parameters_of_the_root_come_before_its_children():
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False))
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    assert flags(run_order(model, ["0"]).inner[0]) == ("0", True, True)


def test_the_indices_of_a_lookup_have_no_gradient_whatever_ran_before():
    run = run_order(nn.Sequential(*(nn.Embedding(2, 2) for _ in range(2))), ["0", "1"], lookups=["1"])
    assert [flags(inner) for inner in run.inner] == [("0", False, True), ("1", False, True)]

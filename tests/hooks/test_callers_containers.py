"""The containers of the root's inputs, which FSDP2 copies where it moves tensors to a device."""

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.distributed.utils import _to_kwargs

from zeroamp.hooks.callers_containers import CallersContainers
from zeroamp.hooks.root_forward import ForwardCall
from zeroamp.hooks.tensors import map_tensors

Pair = namedtuple("Pair", ["first", "second"])


def _moved(args, kwargs):
    """What FSDP2 makes of arguments on another device: its own function, and clones for the tensors on the device."""
    (args,), (kwargs,) = _to_kwargs(args, kwargs, torch.device("cpu"), False)
    return map_tensors(torch.clone, (args, kwargs))


@pytest.mark.parametrize("fails", [False, True])
def test_the_root_gets_the_callers_containers_with_moved_tensors(fails):
    containers, root = CallersContainers(copies_of_root=True), nn.Identity()
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    args, kwargs = (one, [two, "text"], Pair([], 1)), {"state": {"x": three, "more": {}}}
    around = containers.around_root(ForwardCall(args, kwargs, is_outermost=True))
    with around:
        taken, by_name = containers.take_inputs_of_root(root, *_moved(args, kwargs))
        assert taken[1] is args[1]
        assert taken[2].first is args[2].first
        assert by_name["state"] is kwargs["state"]
        assert taken[0] is not one
        assert args[1][0] is not two
        taken[2].first.append("new")
        by_name["state"]["more"]["y"] = one
        if not fails:
            containers.end_forward(root, (), None)
    assert args[1][0] is two
    assert args[2].first == ["new"]
    assert kwargs["state"]["x"] is three
    assert kwargs["state"]["more"]["y"] is one


def test_a_forward_without_containers_is_left_alone():
    containers, args = CallersContainers(copies_of_root=True), (torch.ones(1),)
    with containers.around_root(ForwardCall(args, {}, is_outermost=True)):
        taken = containers.take_inputs_of_root(nn.Identity(), args, {})
    assert taken[0] is args

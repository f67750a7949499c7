"""`map_tensors` changes the tensors in containers, and leaves other objects as they are."""

from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.utils import _apply_to_tensors

from zeroamp.hooks.precision.module_casts import run_in_fp32
from zeroamp.hooks.tensors import map_tensors

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Fields:
    value: object
    others: dict = field(default_factory=dict)
    text: str = "text"


def _low(tensor):
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def _leaves(value):
    """The containers with (dtype, values) in place of tensors."""
    return _apply_to_tensors(lambda tensor: (tensor.dtype, tensor.tolist()), value)


ONE, NUMBER = torch.ones(2), torch.tensor(3)
CASES = (
    ONE,
    (ONE, NUMBER, "text", None),
    {"a": ONE, "b": (NUMBER, {"c": ONE})},
    OrderedDict(z=ONE, a=NUMBER),
    [Fields(Pair(NUMBER, ONE), {"a": [ONE]})],
)


def test_tensors_are_changed_in_the_containers_of_fsdp2():
    for value in CASES:
        expected, found = _apply_to_tensors(_low, value), map_tensors(_low, value)
        assert type(found) is type(expected)
        assert _leaves(found) == _leaves(expected)


def test_a_copy_has_the_class_of_its_container():
    counts = defaultdict(list, a=ONE)
    found = map_tensors(_low, counts)
    assert (found["a"].dtype, found["missing"], counts["a"].dtype) == (torch.bfloat16, [], torch.float32)
    assert [each.dtype for each in map_tensors(_low, deque([ONE]))] == [torch.bfloat16]
    assert type(map_tensors(_low, torch.sort(ONE))) is type(torch.sort(ONE))


def test_what_does_not_change_is_the_same_object():
    class Cache:
        tensor = ONE

    numbers, state, cache = [NUMBER], Fields(NUMBER), Cache()
    found = map_tensors(_low, (numbers, state, cache, Fields, ONE))
    assert found[0] is numbers
    assert found[1] is state
    assert found[2] is cache
    assert found[3] is Fields
    assert found[4].dtype == torch.bfloat16


def test_a_compiled_fp32_region_casts_in_containers():
    class Region(nn.Module):
        def forward(self, pair, *, more):
            return {"sum": pair[0] + more["x"], "dtype": more["x"].dtype}

    region = Region()
    run_in_fp32(region, "cpu", torch.bfloat16)
    inputs = Pair(ONE.bfloat16(), NUMBER)
    expected = region(inputs, more={"x": ONE.bfloat16()})
    found = torch.compile(region, fullgraph=True, backend="eager")(inputs, more={"x": ONE.bfloat16()})
    assert (found["dtype"], found["sum"].dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(found["sum"], expected["sum"])

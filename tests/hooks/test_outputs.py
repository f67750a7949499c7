"""Outputs in fp32: which tensors are cast, and that their containers are copies of the same class."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from zeroamp.hooks.precision.outputs import in_fp32

Pair = namedtuple("Pair", ["logits", "other"])


@dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor
    made: list = field(init=False, default_factory=list)


def _low(*shape):
    return torch.ones(shape, dtype=torch.bfloat16, requires_grad=True)


def _cast(output):
    return in_fp32(output, torch.bfloat16)


def _logits(output):
    return output["logits"] if isinstance(output, dict) else getattr(output, "logits", None)


@pytest.mark.parametrize("make", [CausalLMOutputWithPast, Frozen, OrderedDict, lambda logits: Pair(logits, 1)])
def test_a_container_is_copied_and_keeps_its_class(make):
    output = make(logits=_low(2))
    found = _cast(output)
    assert type(found) is type(output)
    assert (_logits(found).dtype, _logits(output).dtype) == (torch.float32, torch.bfloat16)


def test_a_copy_retains_what_is_no_field():
    output, frozen = CausalLMOutputWithPast(logits=_low(2)), Frozen(_low(2))
    output.extra = "extra"
    frozen.made.append(1)
    found = _cast(output)
    assert found.extra == "extra"
    assert found["logits"] is found.logits is found[0]
    assert _cast(frozen).made == [1]


@pytest.mark.parametrize(
    "output",
    [
        _low(),
        (_low(), _low(2)),
        {"loss": _low(), "logits": _low(2)},
        CausalLMOutputWithPast(loss=torch.tensor(1.0, requires_grad=True), logits=_low(2)),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, requires_grad=True), 3, None),
        UserDict(logits=_low(2)),
        [],
    ],
    ids=["the loss", "tuple", "dict", "ModelOutput", "nothing to cast", "not a dict", "empty"],
)
def test_an_output_with_a_loss_is_returned_as_it_is(output):
    assert _cast(output) is output


def test_an_auxiliary_loss_does_not_count():
    """A loss outside adds it to that of the logits. A score of one element is no loss either."""
    assert [each.dtype for each in _cast((_low(2), _low()))] == [torch.float32] * 2
    assert _cast(_low(1, 1)).dtype == torch.float32
    assert _cast({"hidden": (_low(2),), "loss": None})["hidden"][0].dtype == torch.float32


def test_without_gradients_only_the_outermost_tensors_are_cast():
    """The others are caches and hidden states."""
    with torch.no_grad():
        found = _cast({"logits": torch.ones(2).bfloat16(), "caches": (torch.ones(2).bfloat16(),)})
        assert _cast(torch.ones(2).bfloat16()).dtype == torch.float32
    assert (found["logits"].dtype, found["caches"][0].dtype) == (torch.float32, torch.bfloat16)

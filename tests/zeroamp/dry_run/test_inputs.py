"""What the model is called with."""

import sys

import torch
from torch import nn

from tests.models.small import hf_llama_config
from zeroamp.dry_run.inputs import arguments_for, sequences_are_not_packed


def test_tensors_that_the_caller_makes_cost_no_memory():
    (tokens,), kwargs = arguments_for(nn.Linear(1, 1), 2**40, 2**20, torch.zeros)
    assert (tokens.device.type, tuple(tokens.shape), kwargs) == ("meta", (2**40, 2**20), {})


def test_a_language_model_gets_tokens_and_labels():
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(hf_llama_config())
    args, kwargs = arguments_for(model, 3, 5, None)
    assert args == ()
    assert {key: tuple(value.shape) for key, value in kwargs.items() if key != "use_cache"} == {
        "input_ids": (3, 5),
        "labels": (3, 5),
    }
    assert kwargs["use_cache"] is False


def test_what_transformers_thinks_of_packed_sequences_is_put_back():
    import transformers.masking_utils as masking

    before = masking.find_packed_sequence_indices
    with sequences_are_not_packed():
        assert masking.find_packed_sequence_indices(torch.arange(4)[None]) is None
    assert masking.find_packed_sequence_indices is before


def test_without_transformers_nothing_is_changed(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers.masking_utils", raising=False)
    with sequences_are_not_packed():
        assert "transformers.masking_utils" not in sys.modules

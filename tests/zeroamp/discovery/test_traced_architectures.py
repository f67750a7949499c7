"""Real architectures at tiny size: no answer "safe" is other than that of a run with that parameter in bf16."""

import pytest
import torch

import zeroamp
from tests.models.architectures import ARCHITECTURES, TRANSFORMERS
from tests.models.small import batch, build
from tests.oracles.autocast_reads import dtypes_read
from tests.oracles.low_precision_gather import gathered, is_unchanged, randomise, rounded
from tests.selection import slow_but

ONLY_ROUNDED = {
    "t5": 2,  # relative_attention_bias: gathered by an embedding, then cast; its gradient adds up in fp32
    "mixtral_batched": 4,  # experts picked by an index, then cast: the same
    "attention": 2,  # bias_k and bias_v: repeated, then cast
    "recurrent": 1,  # the embedding
}
"""Parameters whose rounding changes nothing, and which are not safe all the same: gathered low, their gradients would
add up in bf16."""

LOW = {torch.bfloat16}


@pytest.fixture(params=slow_but(ARCHITECTURES, "llama", "conv_net", "attention"))
def architecture(request):
    if request.param in TRANSFORMERS:
        pytest.importorskip("transformers", reason="the model is transformers'")
    torch.manual_seed(0)
    model, args, kwargs = ARCHITECTURES[request.param]()
    model.train()
    return request.param, randomise(model), args, kwargs


def test_what_is_safe_changes_no_bit(architecture):
    name, model, args, kwargs = architecture
    found = zeroamp.discover_safe_parameters(model, args, kwargs)
    assert {reason for reason in found.reasons.values() if "never used" in reason} == set()
    assert 0 < len(found.safe) < len(found.reasons)
    only_rounded, undecided = [], []
    for parameter, reason in found.reasons.items():
        unchanged = is_unchanged(model, gathered(model, [parameter]), args, kwargs)
        assert unchanged or parameter not in found.safe, f"{parameter}: {reason}"
        if unchanged and parameter not in found.safe:
            undecided.append((parameter, reason))
        if not unchanged and is_unchanged(model, rounded(model, [parameter]), args, kwargs):
            only_rounded.append(parameter)
    assert len(only_rounded) == ONLY_ROUNDED.get(name, 0), only_rounded
    assert undecided == []
    assert is_unchanged(model, gathered(model, found.safe), args, kwargs)


def _agreement(model, args, kwargs):
    """Return how many parameters are decided as plain autocast reads them, and the reasons of the others."""
    found = zeroamp.discover_safe_parameters(model, args, kwargs)
    read = dtypes_read(model, args, kwargs, torch.bfloat16)
    others = {name: reason for name, reason in found.reasons.items() if (name in found.safe) != (read[name] == LOW)}
    return len(read) - len(others), others


def test_every_parameter_is_decided_as_plain_autocast_reads_it(architecture):
    """Low if autocast only casts it, fp32 if an op reads it in fp32: also if another op reads it low (tied weights)."""
    _, model, args, kwargs = architecture
    num_agreed, others = _agreement(model, args, kwargs)
    assert (num_agreed, others) == (len(list(model.parameters())), {})


@pytest.mark.parametrize("name", slow_but(["llama_tied", "llama_untied", "conv", "encoder"], "encoder"))
def test_small_models_are_decided_as_plain_autocast_reads_them(name):
    model = randomise(build(name))
    num_agreed, others = _agreement(model, (batch(name, 0),), {})
    assert (num_agreed, others) == (len(list(model.parameters())), {})


def test_transformers_dummy_inputs_give_the_same_answer():
    pytest.importorskip("transformers", reason="the model is transformers'")
    model, args, kwargs = ARCHITECTURES["llama"]()
    assert zeroamp.discover_safe_parameters(model).safe == zeroamp.discover_safe_parameters(model, args, kwargs).safe


def test_a_vision_model_has_no_dummy_inputs_of_its_own():
    pytest.importorskip("transformers", reason="the model is transformers'")
    with pytest.raises(zeroamp.ConfigError, match="dummy_inputs of ViTForImageClassification .*'pixel_values'"):
        zeroamp.discover_safe_parameters(ARCHITECTURES["vit"]()[0])


def test_experts_of_mixtral_stay_in_fp32_also_on_the_meta_device():
    """`grouped_mm` is on no list of autocast."""
    pytest.importorskip("transformers", reason="the model is transformers'")
    model, args, kwargs = ARCHITECTURES["mixtral"]()
    found = zeroamp.discover_safe_parameters(model, args, kwargs)
    assert "model.layers.0.mlp.experts.gate_up_proj" not in found.safe
    assert "model.layers.0.mlp.gate.weight" in found.safe  # the router: a plain linear layer
    assert zeroamp.discover_safe_parameters(model.to("meta"), args, kwargs) == found

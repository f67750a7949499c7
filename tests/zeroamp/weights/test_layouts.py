"""Files in their published layout: every part of every tensor is what transformers' `from_pretrained` makes."""

import pytest
import torch
from safetensors.torch import save_file

import zeroamp
from tests.models.architectures import IDS, SMALL, mixtral
from tests.processes.training import config, full_parameters, policy, same_bits
from zeroamp.weights.files import INDEX, Stored
from zeroamp.weights.layouts import outline_of_model, parts_of_model

pytest.importorskip("transformers", reason="the rules are transformers'")


def _stored(folder, tensors):
    from safetensors import safe_open

    save_file(tensors, folder / "some.safetensors")
    file = safe_open(folder / "some.safetensors", framework="pt")
    return {name: Stored(name, file) for name in tensors}


def _qwen3_vl_moe():
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    text = {
        **SMALL,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "head_dim": 8,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    }
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 32,
              "deepstack_visual_indexes": [0], "num_position_embeddings": 16}  # fmt: skip
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision))


def test_the_parts_of_published_files_are_the_models_tensors(tmp_path):
    """`save_pretrained` writes the published layout, by the same rules in reverse."""
    from safetensors.torch import load_file

    torch.manual_seed(0)
    model = _qwen3_vl_moe()
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    state = model.state_dict()
    # Experts are published transposed; save_pretrained leaves them as they are.
    experts = [key for key in state if key.endswith(("gate_up_proj", "down_proj"))]
    files |= {key: files[key].transpose(1, 2).contiguous() for key in experts}
    assert any(name not in files or files[name].shape != state[name].shape for name in state)  # another layout
    parts = parts_of_model(model, _stored(tmp_path, files), set(state))
    assert parts.keys() <= state.keys()
    for key, part in parts.items():
        assert part.shape == tuple(state[key].shape), key
        assert torch.equal(part.read(), state[key]), key
        if len(part.shape) == 3:
            for dim in range(3):
                half = part.shape[dim] // 2
                slices = (*(slice(None),) * dim, slice(half, 2 * half))
                assert torch.equal(part.read(slices), state[key][slices]), (key, dim)


def test_operations_on_whole_tensors(tmp_path):
    """One matrix for queries, keys and values, cut by transformers' own operation."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter

    from tests.models.small import hf_llama

    model = hf_llama(False)
    state = model.state_dict()
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    whole = torch.arange(96 * 32.0).reshape(96, 32)
    model.config.model_type = "fused_llama"
    rule = WeightConverter(["self_attn.qkv.weight"], ["self_attn.q_proj.weight", "self_attn.k_proj.weight",
                           "self_attn.v_proj.weight"], operations=[Chunk(dim=0)])  # fmt: skip
    conversion_mapping.register_checkpoint_conversion_mapping("fused_llama", [rule])
    try:
        stored = _stored(tmp_path, {"model.layers.0.self_attn.qkv.weight": whole})
        parts = parts_of_model(model, stored, set(state))
    finally:
        conversion_mapping._checkpoint_conversion_mapping_cache.pop("fused_llama")
        getattr(conversion_mapping, "USER_REGISTERED_MAPPINGS", set()).discard("fused_llama")
    assert list(parts) == names
    for part, expected in zip(parts.values(), whole.chunk(3), strict=True):
        assert torch.equal(part.read(), expected)
        assert torch.equal(part.read((slice(None), slice(3, 7))), expected[:, 3:7])


def _described(model):
    """The rules of transformers that are found for a model, as plain values that can be compared."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    rules = get_model_conversion_mapping(outline_of_model(model))
    names = ("source_patterns", "target_patterns", "scope_prefix")  # transformers 5.3 has no prefix
    return [[getattr(rule, name, None) for name in names] for rule in rules]


def _load_experts(folder):
    with torch.device("meta"):
        model = mixtral("eager")[0]
    classes = [type(module) for module in model.modules()]
    rules = _described(model)
    model = zeroamp.wrap_model(model, policy(config(3)))
    sharded = [type(module) for module in model.modules()]
    assert _described(model) == rules, "transformers finds other rules for a model of FSDP2's classes"
    zeroamp.load_hf(model, folder)
    assert [type(module) for module in model.modules()] == sharded != classes
    with torch.no_grad():
        logits = model.eval()(input_ids=IDS).logits
    return full_parameters(model), logits


def test_experts_of_published_files_fill_a_meta_model(ranks2, tmp_path):
    torch.manual_seed(0)
    mixtral("eager")[0].to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / INDEX).exists()
    expected = type(mixtral("eager")[0]).from_pretrained(tmp_path, dtype=torch.float32)
    for parameters, logits in ranks2.run(_load_experts, tmp_path):
        assert same_bits(parameters, full_parameters(expected)) == []
        assert logits.isfinite().all()

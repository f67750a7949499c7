"""Families of transformers that name modules which stay in fp32. transformers collects the names in sets."""

from typing import Any

from tests.models.families import _DECODER, _MOE, _TOKENS, FAMILIES, Family, _of_transformers, _text

_LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


def _lm(name: str, **values: Any) -> Family:
    return Family(build=_of_transformers(f"{name}ForCausalLM", f"{name}Config", **_TOKENS, **values), batch=_text)


KEPT_IN_FP32: dict[str, tuple[Family, str]] = {
    "DeepSeek-V3": (FAMILIES["DeepSeek-V3"], "bf16"),
    "gpt-oss": (FAMILIES["gpt-oss"], "fp16"),
    "RWKV": (FAMILIES["RWKV"], "fp16"),
    "T5": (FAMILIES["T5"], "fp16"),
    "Kimi-Linear": (
        _lm("KimiLinear", **{**_DECODER, "num_key_value_heads": 4}, **_MOE, **_LATENT, num_experts=4,
            num_shared_experts=1, first_k_dense_replace=1, linear_attn_config={
                "kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4,
            }),
        "bf16",
    ),
    "Llama": (FAMILIES["Llama"], "bf16"),
    "CLIP": (FAMILIES["CLIP"], "bf16"),
}  # fmt: skip
"""Name -> the family, and the precision in which it keeps modules in fp32. The last two keep none."""

"""A tiny model of each family that people train, with the batches of its training steps. Plain torch and transformers.

A model returns its loss, or transformers' output that has one. There is no dropout: a batch decides everything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Batch = dict[str, Any]
NUM_RANKS = 2
"""The batches of one training step are numbered `step * NUM_RANKS + rank`."""

_VOCAB = 64
_SIZES = {"vocab_size": _VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_DECODER = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 32}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_IMAGES = {"image_size": 16, "patch_size": 4}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to build the model and its batches."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    """Batch number `index`, as keyword arguments of the model's forward: the same values in every process."""
    refused_with_default_list: str = ""
    """What the error says with the default list of safe modules; empty: that list can be used."""
    keep_in_fp32: tuple[str, ...] = ()
    """The config's `data_types.keep_in_fp32_modules`, if the model needs any."""

    def seeded(self, seed: int = 0) -> nn.Module:
        """Build the model in training mode, of the same weights wherever it is built."""
        torch.manual_seed(seed)
        return self.build().train()


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of one forward."""
    output = model(**batch)
    return output if isinstance(output, torch.Tensor) else output.loss


def _generator(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + index)


def _noise(index: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator(index))


def _ids(index: int, *shape: int) -> torch.Tensor:
    return torch.randint(3, _VOCAB, shape, generator=_generator(index))


def _text(index: int) -> Batch:
    ids = _ids(index, 2, 9)
    return {"input_ids": ids, "labels": ids}


def _images(index: int) -> Batch:
    return {"pixel_values": _noise(index, 2, 3, 16, 16), "labels": _ids(index, 2) % 5}


def _pairs(index: int) -> Batch:
    return {"input_ids": _ids(index, 2, 9), "pixel_values": _noise(index, 2, 3, 16, 16), "return_loss": True}


def _of_transformers(model: str, config: str, **values: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**values))

    return build


class _Block(nn.Module):
    """A transformer block whose normalization is modulated by a condition, as DiT's is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(approximate="tanh"), nn.Linear(2 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        h = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attention(h, h, h, need_weights=False)[0]
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


def _embedded(times: torch.Tensor, width: int) -> torch.Tensor:
    """Return sines and cosines of times in [0, 1): shape [batch, width], fp32."""
    angles = times[:, None] * torch.logspace(0, 3, width // 2)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Dit(nn.Module):
    """A diffusion transformer: it predicts the noise that was added to an image."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.position = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(5, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(2))
        self.head = nn.Linear(width, 3 * 16)

    def forward(self, images: torch.Tensor, noise: torch.Tensor, times: torch.Tensor, labels: torch.Tensor) -> Any:
        mixed = images + times[:, None, None, None] * (noise - images)
        x = self.patches(mixed).flatten(2).mT + self.position
        condition = self.time(_embedded(times, self.width)) + self.label(labels)
        for block in self.blocks:
            x = block(x, condition)
        expected = F.unfold(noise - images, 4, stride=4).mT
        return F.mse_loss(self.head(x).float(), expected)


def _diffusion(index: int) -> Batch:
    generator = _generator(index)
    return {
        "images": torch.randn(2, 3, 16, 16, generator=generator),
        "noise": torch.randn(2, 3, 16, 16, generator=generator),
        "times": torch.rand(2, generator=generator),
    }


def _labeled_diffusion(index: int) -> Batch:
    return {**_diffusion(index), "labels": _ids(index, 2) % 5}


class _ResBlock(nn.Module):
    def __init__(self, num_in: int, num_out: int, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, num_in), nn.Conv2d(num_in, num_out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, num_out), nn.Conv2d(num_out, num_out, 3, padding=1)
        self.time = nn.Linear(width, num_out)
        self.skip = nn.Conv2d(num_in, num_out, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class Unet(nn.Module):
    """A diffusion UNet: what leaves a layer on the way down is read by the next one and again on the way up."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList(_ResBlock(a, b, width) for a, b in ((8, 8), (8, 16)))
        self.pool = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.middle = _ResBlock(16, 16, width)
        self.up = nn.ModuleList(_ResBlock(a, b, width) for a, b in ((32, 16), (24, 16), (24, 8), (16, 8)))
        self.head = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, images: torch.Tensor, noise: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        time = self.time(_embedded(times, self.width))
        skips = [self.stem(images + times[:, None, None, None] * (noise - images))]
        skips.append(self.down[0](skips[-1], time))
        skips.append(self.pool(skips[-1]))
        skips.append(self.down[1](skips[-1], time))
        x = self.middle(skips[-1], time)
        for index, block in enumerate(self.up):
            if index == 2:
                x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], dim=1), time)
        return F.mse_loss(self.head(x).float(), noise - images)


class _GnnLayer(nn.Module):
    """Messages along the edges, each kind of edge by its own Linear; the last kind occurs in no batch."""

    def __init__(self, width: int, num_kinds: int = 4) -> None:
        super().__init__()
        self.messages = nn.ModuleList(nn.Linear(width, width) for _ in range(num_kinds))
        self.own, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        h = self.own(x)
        for kind in kinds.unique().tolist():
            source, target = edges[:, kinds == kind]
            h = h.index_add(0, target, self.messages[kind](x[source]).to(h.dtype))
        return x + F.relu(self.norm(h))


class Gnn(nn.Module):
    """A graph network that runs what a batch asks for: branches within a unit, and whole layers that are dropped."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.layers = nn.ModuleList(_GnnLayer(width) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(width, size) for size in (3, 5))
        self.unused = nn.Parameter(torch.randn(width))

    def forward(
        self, nodes: torch.Tensor, edges: torch.Tensor, kinds: torch.Tensor, dropped: int, labels: torch.Tensor
    ) -> torch.Tensor:
        x = self.embed(nodes)
        for index, layer in enumerate(self.layers):
            if index != dropped:
                x = layer(x, edges, kinds)
        return F.cross_entropy(self.heads[dropped % 2](x).float(), labels)


def _graph(index: int) -> Batch:
    step, rank = divmod(index, NUM_RANKS)
    generator = _generator(index)
    return {
        "nodes": torch.randn(7, 6, generator=generator),
        "edges": torch.randint(0, 7, (2, 12), generator=generator),
        "kinds": torch.tensor([0, 1 + rank]).repeat(6),  # kind 0 on every rank, another on each
        "dropped": step % 4,  # the same layer on every rank, or none
        "labels": torch.randint(0, 3, (7,), generator=generator),
    }


class LoraLinear(nn.Module):
    """A frozen Linear and a trainable product of two small matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.lora_b.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2 * self.lora_b(self.lora_a(x))


class Lora(nn.Module):
    """A frozen LLaMA with adapters at the attention's Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.model = FAMILIES["Llama"].build().requires_grad_(False)
        for layer in self.model.model.layers:
            for name in ("q_proj", "v_proj"):
                setattr(layer.self_attn, name, LoraLinear(getattr(layer.self_attn, name)))

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.model(**batch).loss


_IMAGE, _VISION_START = 60, 58


def _llava_batch(index: int) -> Batch:
    ids = _ids(index, 2, 9) % 50 + 3
    ids = torch.cat([torch.full((2, 16), _IMAGE), ids], dim=1)
    labels = ids.masked_fill(ids == _IMAGE, -100)
    return {"input_ids": ids, "labels": labels, "pixel_values": _noise(index, 2, 3, 16, 16)}


def _qwen2_vl_batch(index: int) -> Batch:
    """One image of 4 x 4 patches, which become 4 tokens, before the text of each sequence."""
    text = _ids(index, 2, 9) % 50 + 3
    start, image = torch.full((2, 1), _VISION_START), torch.full((2, 4), _IMAGE)
    ids = torch.cat([start, image, text], dim=1)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids == _IMAGE, -100),
        "pixel_values": _noise(index, 2 * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": (ids == _IMAGE).int(),
    }


def _whisper_batch(index: int) -> Batch:
    return {"input_features": _noise(index, 2, 8, 20), "labels": _ids(index, 2, 6)}


_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_TEXT_TOWER = {**_TOWER, "vocab_size": _VOCAB, "max_position_embeddings": 32, **_TOKENS}
_VISION_TOWER = {**_TOWER, **_IMAGES}

FAMILIES: dict[str, Family] = {
    "Llama": Family(build=_of_transformers("LlamaForCausalLM", "LlamaConfig", **_DECODER), batch=_text),
    "Phi-3": Family(build=_of_transformers("Phi3ForCausalLM", "Phi3Config", **_DECODER, **_TOKENS), batch=_text),
    "Mixtral": Family(
        build=_of_transformers("MixtralForCausalLM", "MixtralConfig", **_DECODER, num_local_experts=4,
                               num_experts_per_tok=2),
        batch=_text,
    ),
    "gpt-oss": Family(
        build=_of_transformers("GptOssForCausalLM", "GptOssConfig", **_DECODER, **_TOKENS, num_local_experts=4,
                               num_experts_per_tok=2, head_dim=8, sliding_window=4,
                               layer_types=["sliding_attention", "full_attention"]),
        batch=_text,
    ),
    "Qwen3-MoE": Family(
        build=_of_transformers("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_DECODER, **_MOE, num_experts=4, head_dim=8),
        batch=_text,
    ),
    "DeepSeek-V3": Family(
        build=_of_transformers("DeepseekV3ForCausalLM", "DeepseekV3Config", **{**_DECODER, "num_key_value_heads": 4},
                               **_MOE, n_routed_experts=4, n_group=2, topk_group=1, q_lora_rank=16, kv_lora_rank=16,
                               qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1,
                               **_TOKENS),
        batch=_text,
    ),
    "Gemma3": Family(
        build=_of_transformers("Gemma3ForCausalLM", "Gemma3TextConfig", **_DECODER, head_dim=8, sliding_window=4,
                               layer_types=["sliding_attention", "full_attention"]),
        batch=_text,
    ),
    "T5": Family(
        build=_of_transformers("T5ForConditionalGeneration", "T5Config", vocab_size=_VOCAB, d_model=32, d_kv=8, d_ff=48,
                               num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0),
        batch=_text,
    ),
    "Whisper": Family(
        build=_of_transformers("WhisperForConditionalGeneration", "WhisperConfig", vocab_size=_VOCAB, num_mel_bins=8,
                               encoder_layers=2, encoder_attention_heads=4, decoder_layers=2, decoder_attention_heads=4,
                               decoder_ffn_dim=48, encoder_ffn_dim=48, d_model=32, max_source_positions=10,
                               max_target_positions=16, dropout=0.0, decoder_start_token_id=1, **_TOKENS),
        batch=_whisper_batch,
    ),
    "ViT": Family(
        build=_of_transformers("ViTForImageClassification", "ViTConfig", **_VISION_TOWER, **_NO_DROPOUT, num_labels=5),
        batch=_images,
    ),
    "Mamba": Family(
        build=_of_transformers("MambaForCausalLM", "MambaConfig", vocab_size=_VOCAB, hidden_size=32, state_size=4,
                               num_hidden_layers=2, use_cache=False),
        batch=_text,
    ),
    "Mamba-2": Family(
        build=_of_transformers("Mamba2ForCausalLM", "Mamba2Config", vocab_size=_VOCAB, hidden_size=32, state_size=4,
                               num_hidden_layers=2, num_heads=8, head_dim=8, n_groups=2, chunk_size=4, use_cache=False),
        batch=_text,
    ),
    "RWKV": Family(
        build=_of_transformers("RwkvForCausalLM", "RwkvConfig", vocab_size=_VOCAB, hidden_size=32, num_hidden_layers=2,
                               attention_hidden_size=32, intermediate_size=48, context_length=32, use_cache=False),
        batch=_text,
    ),
    "DiT": Family(build=Dit, batch=_labeled_diffusion),
    "BERT": Family(
        build=_of_transformers("BertForMaskedLM", "BertConfig", **_SIZES, intermediate_size=48,
                               max_position_embeddings=32, **_NO_DROPOUT),
        batch=_text,
    ),
    "GPT-2": Family(
        build=_of_transformers("GPT2LMHeadModel", "GPT2Config", vocab_size=_VOCAB, n_embd=32, n_layer=2, n_head=4,
                               n_positions=32, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0),
        batch=_text,
        refused_with_default_list="own no parameter of GPT2LMHeadModel",  # its layers are transformers' Conv1D
    ),
    "LoRA": Family(build=Lora, batch=_text),
    "Qwen2-VL": Family(
        build=_of_transformers(
            "Qwen2VLForConditionalGeneration", "Qwen2VLConfig",
            text_config={**_DECODER, "rope_parameters": {"type": "mrope", "mrope_section": [1, 1, 2]}},
            vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2,
                           "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
            image_token_id=_IMAGE, video_token_id=61, vision_start_token_id=_VISION_START, vision_end_token_id=59,
        ),
        batch=_qwen2_vl_batch,
    ),
    "ConvNeXt": Family(
        build=_of_transformers("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16], depths=[1, 2],
                               num_stages=2, patch_size=2, num_labels=5, drop_path_rate=0.0),
        batch=_images,
    ),
    "ResNet": Family(
        build=_of_transformers("ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16],
                               depths=[1, 2], layer_type="basic", num_labels=5),
        batch=_images,
    ),
    "CLIP": Family(
        build=_of_transformers("CLIPModel", "CLIPConfig", text_config=_TEXT_TOWER, vision_config=_VISION_TOWER,
                               projection_dim=16),
        batch=_pairs,
    ),
    "SigLIP": Family(
        build=_of_transformers("SiglipModel", "SiglipConfig", text_config=_TEXT_TOWER, vision_config=_VISION_TOWER),
        batch=_pairs,
    ),
    "LLaVA": Family(
        build=_of_transformers("LlavaForConditionalGeneration", "LlavaConfig",
                               vision_config={"model_type": "clip_vision_model", **_VISION_TOWER},
                               text_config={"model_type": "llama", **_DECODER}, image_token_index=_IMAGE),
        batch=_llava_batch,
    ),
    "UNet": Family(build=Unet, batch=_diffusion),
    "GNN": Family(build=Gnn, batch=_graph),
}  # fmt: skip
"""LLaVA reads the vision tower's last layer but one: the last one is in no loss."""

"""Tiny models of further families: hybrids, routed experts, encoder-decoders, speech, detection, diffusion."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.models import families
from tests.models.families import Batch, Family

_noise, _ids, _text, _images = families._noise, families._ids, families._text, families._images
_of_transformers, _pairs = families._of_transformers, families._pairs
_VOCAB, _SIZES, _DECODER, _TOKENS = families._VOCAB, families._SIZES, families._DECODER, families._TOKENS
_NO_DROPOUT = families._NO_DROPOUT


class _JointBlock(nn.Module):
    """Images and texts with weights of their own and one attention, as in Stable Diffusion 3 and FLUX."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.modulation = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(2)
        )

    def forward(self, streams: tuple[torch.Tensor, torch.Tensor], condition: torch.Tensor) -> Any:
        heads, gates = [], []
        for x, norm, qkv, modulation in zip(streams, self.norms, self.qkv, self.modulation, strict=True):
            shift, scale, gate = modulation(condition)[:, None].chunk(3, dim=-1)
            gates.append(gate)
            heads.append(qkv(norm(x) * (1 + scale) + shift).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4))
        joint = F.scaled_dot_product_attention(*torch.cat(heads, dim=3)).transpose(1, 2).flatten(2)
        parts = joint.split([x.shape[1] for x in streams], dim=1)
        after = [x + g * out(p) for x, g, out, p in zip(streams, gates, self.out, parts, strict=True)]
        return tuple(x + mlp(x) for x, mlp in zip(after, self.mlp, strict=True))


class JointDiffusion(nn.Module):
    """A rectified flow over image patches, conditioned on a text."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches, self.words = nn.Linear(48, width), nn.Embedding(_VOCAB, width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU())
        self.blocks = nn.ModuleList(_JointBlock(width) for _ in range(2))
        self.head = nn.Linear(width, 48)

    def forward(self, images: torch.Tensor, noise: torch.Tensor, times: torch.Tensor, ids: torch.Tensor) -> Any:
        mixed = images + times[:, None, None, None] * (noise - images)
        streams = self.patches(F.unfold(mixed, 4, stride=4).mT), self.words(ids)
        condition = self.time(families._embedded(times, 32))
        for block in self.blocks:
            streams = block(streams, condition)
        return F.mse_loss(self.head(streams[0]).float(), F.unfold(noise - images, 4, stride=4).mT)


class Detector(nn.Module):
    """DETR's shape: a convolution, `nn.Transformer` from object queries to patches, heads for classes and boxes."""

    def __init__(self, width: int = 32, num_queries: int = 5) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, width, 4, stride=4), nn.BatchNorm2d(width), nn.ReLU())
        self.queries = nn.Parameter(torch.randn(num_queries, width))
        self.transformer = nn.Transformer(width, 4, 1, 1, 48, dropout=0.0, batch_first=True)
        self.classes, self.boxes = nn.Linear(width, 7), nn.Linear(width, 4)

    def forward(self, images: torch.Tensor, classes: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        patches = self.backbone(images).flatten(2).mT
        x = self.transformer(patches, self.queries.expand(len(images), -1, -1))
        chosen = (self.boxes(x).float().sigmoid() - boxes[:, None]).abs().sum(-1).argmin(-1)  # one object per image
        at = torch.arange(len(images)), chosen
        box_loss = F.l1_loss(self.boxes(x)[at].float().sigmoid(), boxes)
        return F.cross_entropy(self.classes(x)[at].float(), classes) + 5 * box_loss


class DualEncoder(nn.Module):
    """Questions and passages by two BERTs, each with its pooler; every other passage of the batch is a negative."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(**_SIZES, intermediate_size=48, max_position_embeddings=32, **_NO_DROPOUT)
        self.questions, self.passages = BertModel(config), BertModel(config)

    def forward(self, questions: torch.Tensor, passages: torch.Tensor) -> torch.Tensor:
        scores = self.questions(questions).pooler_output @ self.passages(passages).pooler_output.mT
        return F.cross_entropy(scores.float(), torch.arange(len(scores)))


def _joint_diffusion(index: int) -> Batch:
    return {**families._diffusion(index), "ids": _ids(index, 2, 6)}


def _detection(index: int) -> Batch:
    boxes = torch.rand(2, 4, generator=families._generator(index))
    return {"images": _noise(index, 2, 3, 16, 16), "classes": _ids(index, 2) % 7, "boxes": boxes}


def _questions(index: int) -> Batch:
    return {"questions": _ids(index, 4, 6), "passages": _ids(index + 10_000, 4, 9)}


def _waves(index: int) -> Batch:
    return {"input_values": _noise(index, 2, 400), "labels": _ids(index, 2, 3)}


def _speech(index: int) -> Batch:
    return {"input_features": _noise(index, 2, 24, 8), "labels": _ids(index, 2, 5)}


def _series(index: int) -> Batch:
    return {"past_values": _noise(index, 2, 16, 3), "future_values": _noise(index + 10_000, 2, 4, 3)}


def _masks(index: int) -> Batch:
    return {"pixel_values": _noise(index, 2, 3, 32, 32), "labels": _ids(index, 2, 32, 32) % 5}


_SEQ2SEQ = {"vocab_size": _VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
            "max_position_embeddings": 32, "decoder_start_token_id": 2, **_TOKENS}  # fmt: skip
_SPEECH = {**_SIZES, "intermediate_size": 48, "conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3],
           "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "hidden_dropout": 0.0, "layerdrop": 0.0,
           "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0,
           "mask_time_prob": 0.0, "apply_spec_augment": False, **_TOKENS}  # fmt: skip


def _lm(name: str, config: str = "", **more: Any) -> Family:
    build = _of_transformers(f"{name}ForCausalLM", config or f"{name}Config", **{**_DECODER, **_TOKENS, **more})
    return Family(build=build, batch=_text)


def _model(name: str, config: str, batch: Any, **values: Any) -> Family:
    return Family(build=_of_transformers(name, config, **values), batch=batch)


MORE_FAMILIES: dict[str, Family] = {
    # Hybrids of state-space layers, recurrences or linear attention with attention.
    "Jamba": _lm("Jamba", num_experts=4, num_experts_per_tok=2, attn_layer_period=2, attn_layer_offset=1,
                 expert_layer_period=2, expert_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4, use_cache=False),
    "Bamba": _lm("Bamba", mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=4, mamba_chunk_size=4,
                 attn_layer_indices=[1]),
    "Falcon-H1": _lm("FalconH1", mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=4,
                     mamba_chunk_size=4, head_dim=8),
    "RecurrentGemma": _lm("RecurrentGemma", lru_width=32, attention_window_size=8, head_dim=8,
                          block_types=["recurrent", "attention"], attention_dropout=0.0, use_cache=False),
    "Qwen3-Next": _lm("Qwen3Next", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8,
                      shared_expert_intermediate_size=24, linear_num_value_heads=4, linear_num_key_heads=2,
                      linear_key_head_dim=8, linear_value_head_dim=8,
                      layer_types=["linear_attention", "full_attention"]),
    # Routed experts: one of four in an encoder-decoder; a sigmoid before a shared and a routed expert; and
    # two that normalize their queries or scale their branches.
    "Switch": Family(
        build=_of_transformers("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
                               vocab_size=_VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2,
                               num_heads=4, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
                               dropout_rate=0.0, router_jitter_noise=0.0, decoder_start_token_id=0,
                               expert_capacity=16),
        batch=_text,
        keep_in_fp32=("router.classifier.weight",),  # the router casts its Linear to fp32 in each forward
    ),
    "Llama-4": _lm("Llama4", "Llama4TextConfig", num_local_experts=4, intermediate_size_mlp=48, head_dim=8,
                   num_experts_per_tok=1, interleave_moe_layer_step=2, attention_chunk_size=8),
    "OLMoE": _lm("Olmoe", num_experts=4, num_experts_per_tok=2),
    "Granite-MoE": _lm("GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    # Encoder-decoders.
    "BART": _model("BartForConditionalGeneration", "BartConfig", _text, **_SEQ2SEQ),
    "Marian": _model("MarianMTModel", "MarianConfig", _text, **_SEQ2SEQ),
    # Decoders whose blocks differ: parallel branches, ALiBi, capped logits.
    "GPT-NeoX": _lm("GPTNeoX"),
    "BLOOM": _lm("Bloom", n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0),
    "Gemma2": _lm("Gemma2", head_dim=8, sliding_window=4),
    # Encoders: one layer run several times; relative positions.
    "ALBERT": _model("AlbertForMaskedLM", "AlbertConfig", _text, **_SIZES, embedding_size=16, intermediate_size=48,
                     max_position_embeddings=32, **_NO_DROPOUT, classifier_dropout_prob=0.0),
    "DeBERTa-v2": _model("DebertaV2ForMaskedLM", "DebertaV2Config", _text, **_SIZES, intermediate_size=48,
                         max_position_embeddings=32, relative_attention=True, pos_att_type=["p2c", "c2p"],
                         **_NO_DROPOUT, type_vocab_size=0),
    # Speech.
    "wav2vec 2.0": _model("Wav2Vec2ForCTC", "Wav2Vec2Config", _waves, **_SPEECH),
    "Speech2Text": _model("Speech2TextForConditionalGeneration", "Speech2TextConfig", _speech, **_SEQ2SEQ,
                          input_feat_per_channel=8, conv_channels=16, max_source_positions=32, max_target_positions=16),
    # Images, pairs, detection, diffusion.
    "Swin": _model("SwinForImageClassification", "SwinConfig", _images, image_size=16, patch_size=2, embed_dim=16,
                   depths=[1, 2], num_heads=[2, 4], window_size=4, drop_path_rate=0.0, num_labels=5),
    "SegFormer": _model("SegformerForSemanticSegmentation", "SegformerConfig", _masks, num_encoder_blocks=2,
                        depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
                        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, drop_path_rate=0.0,
                        classifier_dropout_prob=0.0, num_labels=5, **_NO_DROPOUT),
    "dual encoder": Family(build=DualEncoder, batch=_questions),
    "detector": Family(build=Detector, batch=_detection),
    "joint diffusion": Family(build=JointDiffusion, batch=_joint_diffusion),
    "PatchTST": _model("PatchTSTForPrediction", "PatchTSTConfig", _series, num_input_channels=3, context_length=16,
                       prediction_length=4, patch_length=4, patch_stride=4, d_model=16, num_attention_heads=2,
                       num_hidden_layers=2, ffn_dim=32, attention_dropout=0.0, path_dropout=0.0, ff_dropout=0.0,
                       head_dropout=0.0, positional_dropout=0.0),
}  # fmt: skip
"""Further families, by name."""

ALL_FAMILIES = families.FAMILIES | MORE_FAMILIES

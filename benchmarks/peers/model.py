"""A LLaMA-like decoder in plain torch: RMSNorm, rotary positions, grouped-query SDPA, SwiGLU, an untied head."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ROTARY_BASE = 10_000.0
WEIGHT_STD = 0.02
RECOMPILE_LIMIT = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a decoder."""

    vocab: int
    width: int
    hidden: int
    """Width inside the SwiGLU."""
    layers: int
    heads: int
    kv_heads: int


SHAPES = {
    "tiny": Shape(vocab=64, width=32, hidden=48, layers=2, heads=4, kv_heads=2),
    "3.7m": Shape(vocab=1024, width=256, hidden=688, layers=4, heads=8, kv_heads=8),  # 3,688,704 parameters
    "100m": Shape(vocab=10_240, width=768, hidden=2048, layers=12, heads=12, kv_heads=12),  # 100,682,496
    "1b": Shape(vocab=32_000, width=2048, hidden=5632, layers=22, heads=32, kv_heads=4),  # TinyLlama's: 1,100,048,384
    "8b": Shape(vocab=128_256, width=4096, hidden=14_336, layers=32, heads=32, kv_heads=8),  # Llama 3's: 8,030,261,248
}


class Attention(nn.Module):
    """Causal, with rotary positions and `kv_heads` keys and values for `heads` queries."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.is_grouped = shape.heads != shape.kv_heads
        self.query = nn.Linear(shape.width, shape.heads * self.head_width, bias=False)
        self.key = nn.Linear(shape.width, shape.kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(shape.width, shape.kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(shape.heads * self.head_width, shape.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return [batch, length, width] of the same; `cos`, `sin`: [length, head width]."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(
            rotated(query, cos, sin), rotated(key, cos, sin), value, is_causal=True, enable_gqa=self.is_grouped
        )
        return self.out(mixed.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, length, width] of the same."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer, the unit that every engine shards, recomputes and compiles."""

    def __init__(self, shape: Shape, *, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.mlp = SwiGLU(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return [batch, length, width] of the same."""
        if self.checkpointing:
            return checkpoint(self.layer, x, cos, sin, use_reentrant=False)
        return self.layer(x, cos, sin)

    def layer(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the same as `forward`, without activation checkpointing."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Returns the mean loss of predicting each next token."""

    def __init__(self, shape: Shape, length: int, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape, checkpointing=checkpointing) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        # No buffers: DDP would send these constants in every forward.
        self.cos, self.sin = rotary(length, shape.width // shape.heads)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the 0-D fp32 loss of int64 tokens [batch, length]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def build(shape: Shape, length: int, device: torch.device, *, checkpointing: bool, compiled: bool) -> Decoder:
    """Return a model with fp32 weights that depend only on the shape and the device type."""
    torch.manual_seed(0)
    with device:
        model = Decoder(shape, length, checkpointing=checkpointing)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=WEIGHT_STD)
    if compiled:
        # All engines share the code of a block, so torch recompiles it for each of them. It must not give up.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = RECOMPILE_LIMIT
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        for block in model.blocks:
            block.compile()
    return model


def rotary(length: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, fp32 [length, width]: angle = position / base^(2 i / width), twice over the width."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return [batch, heads, length, head width] rotated by position, computed in its own dtype with every engine."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)

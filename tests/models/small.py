"""Small models of the kinds people train, and their batches. Plain torch."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from tests.models.embeddings import EMBEDDING_MODELS

VOCAB = 80
WIDTH = 32


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        h = x.float()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight

    def reset_parameters(self):
        nn.init.ones_(self.weight)


class Block(nn.Module):
    def __init__(self, width=WIDTH, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1 = RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = RMSNorm(width)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=True)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(h)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """LLaMA-like decoder; returns the next-token loss."""

    def __init__(self, tied, num_blocks=3):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def logits(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, tokens):
        logits = self.logits(tokens)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class ConvNet(nn.Module):
    """Two stages of convolution, a root-level parameter, and odd sizes that do not divide by the ranks."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(1, b), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1))
            for a, b in ((3, 9), (9, 13))
        )
        self.scale = nn.Parameter(torch.full((13,), 0.5))
        self.head = nn.Linear(13, 5)

    def forward(self, images):
        x = images
        for stage in self.stages:
            x = F.relu(stage(x))
        logits = self.head(x.mean((2, 3)) * self.scale)
        return F.cross_entropy(logits.float(), images.sum((1, 2, 3)).long() % 5)


class ThreeUnits(nn.Module):
    """Three Linear units and nothing else."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Encoder(nn.Module):
    """nn.TransformerEncoder (attention weights owned by nn.MultiheadAttention) with tied input and output."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.randn(1, 16, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.position[:, : tokens.shape[1]]
        logits = self.head(self.encoder(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


class ExpertList(nn.Module):
    """Experts as modules. All run, on the tokens that chose them, so that each has a gradient on every rank."""

    def __init__(self, num_experts, width, inner):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.ModuleDict({"gate_up": nn.Linear(width, 2 * inner, bias=False), "down": nn.Linear(inner, width)})
            for _ in range(num_experts)
        )

    def forward(self, tokens, weights):
        result = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            chosen = weights[:, index].nonzero().flatten()
            gate, up = expert["gate_up"](tokens[chosen]).chunk(2, dim=-1)
            output = expert["down"](F.silu(gate) * up) * weights[chosen, index, None]
            result = result.index_add(0, chosen, output.to(result.dtype))
        return result


class StackedExperts(nn.Module):
    """Experts as slices of two parameters, which no Linear owns."""

    def __init__(self, num_experts, width, inner):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(num_experts, width, 2 * inner) * 0.1)
        self.down = nn.Parameter(torch.randn(num_experts, inner, width) * 0.1)

    def forward(self, tokens, weights):
        gate, up = torch.bmm(tokens.expand(len(self.gate_up), -1, -1), self.gate_up).chunk(2, dim=-1)
        output = torch.bmm(F.silu(gate) * up, self.down)  # every expert on every token; most weights are 0
        return (output * weights.t()[:, :, None]).sum(0).to(tokens.dtype)


class MoeBlock(nn.Module):
    def __init__(self, experts, num_experts, width=WIDTH):
        super().__init__()
        self.norm = RMSNorm(width)
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = experts(num_experts, width, width // 2)

    def forward(self, x):
        tokens = self.norm(x).flatten(0, 1)
        weights = self.router(tokens).float().softmax(-1)
        top, chosen = weights.topk(2, dim=-1)
        weights = torch.zeros_like(weights).scatter(1, chosen, top / top.sum(-1, keepdim=True)).to(tokens.dtype)
        return x + self.experts(tokens, weights).view_as(x)


class Moe(nn.Module):
    """Mixtral-like decoder without attention: a router and the two of its experts that it picks, in both usual forms.

    The number of experts does not divide by the ranks.
    """

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(MoeBlock(experts, 5) for experts in (ExpertList, StackedExperts))
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def hf_llama_config(**more):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True, **more,
    )  # fmt: skip


def hf_llama(tied):
    """transformers' LLaMA, tied or not, as its class makes it."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    settings = hf_llama_config()
    settings.tie_word_embeddings = tied
    return LlamaForCausalLM(settings)


class HfLlama(nn.Module):
    """transformers' LLaMA, called as a user calls it."""

    def __new__(cls):
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM(hf_llama_config())


class Rotated(nn.Module):
    """A block that takes tables in whatever dtype they come, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.gate, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, tables):
        self.seen.append((x.dtype, tables["cos"].dtype, tables["at"].dtype))
        h = self.gate(x * tables["cos"] + x.roll(1, -1) * tables["sin"])
        return x + self.out(F.silu(h))


class MakesFp32(nn.Module):
    """Makes fp32 tensors in its forward, adds one to the activations, and hands others to its blocks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Rotated() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        at = torch.arange(tokens.shape[1])
        angles = at[:, None] / 10 ** (torch.arange(WIDTH) / WIDTH)  # fp32
        x = self.embed(tokens) + angles.sin()
        for block in self.blocks:
            x = block(x, tables={"cos": angles.cos(), "sin": angles.sin(), "at": at})
        logits = self.head(x.to(self.head.weight.dtype))  # the root's own module: not a unit
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


class SkipBlock(nn.Module):
    """A unit that reads its input once, or twice (`residual`), and a skip once."""

    def __init__(self, residual):
        super().__init__()
        self.residual = residual
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, skip=None):
        h = F.silu(self.out(self.norm(x)))
        h = h if skip is None else h * skip
        return x + h if self.residual else h


class Skips(nn.Module):
    """UNet-like: the output of each of the first units feeds the next unit, one of the last, and a side unit."""

    def __init__(self, residual):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.down, self.up, self.side = (
            nn.ModuleList(SkipBlock(residual and is_down) for _ in range(3)) for is_down in (True, False, False)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        skips, total = [], 0
        for down, side in zip(self.down, self.side, strict=True):
            skips.append(x)
            total = total + side(x)
            x = down(x)
        for up in self.up:
            x = up(x, skips.pop())
        return F.cross_entropy(self.head(x + total).float().flatten(0, 1), tokens.flatten())


class OddBlock(nn.Module):
    """Parameters whose first dimension 2 and 4 ranks do not divide, and those of `down` that 3 ranks do not."""

    leaves_out_experts = False

    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(8)
        self.up = nn.Linear(8, 9)  # (9, 8): dimension 1
        self.down = nn.Linear(9, 8, bias=False)  # (8, 9): dimension 0
        self.experts = nn.Parameter(torch.randn(3, 8, 4) * 0.3)  # dimension 1
        self.mixers = nn.Parameter(torch.randn(3, 1, 8) * 0.3)  # dimension 2

    def reset_parameters(self):
        nn.init.normal_(self.experts, std=0.3)
        nn.init.normal_(self.mixers, std=0.3)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.down(F.silu(self.up(h)))
        if self.leaves_out_experts:
            return x
        gates = (h.unsqueeze(-3) * self.mixers).sigmoid()  # [batch, 3, length, 8]
        experts = torch.einsum("bntd,ndk->bntk", gates, self.experts).sum(1)
        return x + torch.cat([experts, -experts], -1)


class OddRows(nn.Module):
    """A model of `OddBlock`s, whose parameters are sharded over dimensions 0, 1 and 2 on 2 and on 4 ranks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB + 1, 8)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(2))
        self.head = nn.Linear(8, VOCAB + 1, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class OddBank(nn.Module):
    """Much larger parameters than activations: a unit for each, of parameters in dimensions 0, 1 and 2."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(BankBlock(rows) for rows in (64, 65, 63))
        self.head = nn.Linear(8, 8)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


class BankBlock(nn.Module):
    def __init__(self, rows):
        super().__init__()
        shapes = (rows, 40, 8), (32, 40, 8), (33, 31, 8), (17, 40, 8), (16, 8)
        self.banks = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, x):
        for bank in self.banks:
            x = x + bank.sum(tuple(range(bank.dim() - 1))).square() / 1000
        return x


class Matrices(nn.Module):
    """Weights of more than 4096 elements per rank on 2 ranks, which 8-bit optimizers quantize.

    Beside them, weights that 2 ranks shard over dimension 1 (`gate`), and unevenly (`odd`).
    """

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 128)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 128), nn.LayerNorm(128)) for _ in range(2)
        )
        self.gate = nn.Linear(128, 3)
        self.odd = nn.Linear(7, 5, bias=False)
        self.head = nn.Linear(128, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = x * self.gate(x).float().sigmoid().sum(-1, keepdim=True) + self.odd(x[..., :7]).float().sum(
            -1, keepdim=True
        )
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class RepeatedBlock(Block):
    """A block with a Linear that only its last run uses."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, is_last):
        x = super().forward(x)
        return x + self.extra(x) if is_last else x


class Recurrent(nn.Module):
    """A decoder whose blocks run three times, for the tokens and again for the reversed ones (Siamese)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(RepeatedBlock() for _ in range(2))
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def _encoded(self, tokens):
        x = self.embed(tokens)
        for number in range(3):
            for block in self.blocks:
                x = block(x, number == 2)
        return self.norm(x)

    def forward(self, tokens):
        logits = self.head(self._encoded(tokens) * self._encoded(tokens.flip(1)).mean(1, keepdim=True))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


MODELS = {
    "llama_tied": lambda: Llama(tied=True),
    "llama_untied": lambda: Llama(tied=False),
    "conv": ConvNet,
    "encoder": Encoder,
    "hf_llama": HfLlama,
    "moe": Moe,
}
MORE_MODELS = {
    "matrices": Matrices,
    "makes_fp32": MakesFp32,
    "odd_bank": OddBank,
    "odd_rows": OddRows,
    "recurrent": Recurrent,
    "skips": lambda: Skips(residual=False),
    "residual_skips": lambda: Skips(residual=True),
    "two_blocks": partial(Llama, tied=True, num_blocks=2),
    "two_blocks_untied": partial(Llama, tied=False, num_blocks=2),
    **{name: partial(model, VOCAB, WIDTH) for name, model in EMBEDDING_MODELS.items()},
}


def build(name, seed=0):
    torch.manual_seed(seed)
    return (MODELS | MORE_MODELS)[name]().train()


def batch(name, index, size=2):
    """Batch number `index`: the same on every rank and in the reference."""
    generator = torch.Generator().manual_seed(1000 + index)
    if name == "conv":
        return torch.randn(size, 3, 6, 6, generator=generator)
    return torch.randint(0, VOCAB, (size, 12), generator=generator)


def loss_of(model, inputs):
    """The loss, for our models and for transformers' alike."""
    if hasattr(model, "_no_split_modules"):
        return model(input_ids=inputs, labels=inputs).loss
    return model(inputs)

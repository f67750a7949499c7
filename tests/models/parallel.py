"""A LLaMA-like decoder that can be parallelized over context and tensor axes, and a layer of experts. Plain torch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F

from tests.models.families import LoraLinear

VOCAB, WIDTH, HEADS, LENGTH = 64, 32, 4, 16
NUM_TOKENS = 16


class Attention(nn.Module):
    """Causal attention. With `context`, a process group, each of its ranks holds a part of the sequence (Ulysses)."""

    def __init__(self, context=None):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.context = context

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (each(x).view(batch, length, -1, WIDTH // HEADS) for each in (self.q, self.k, self.v))
        if self.context is not None:
            q, k, v = (whole_sequence(each, self.context) for each in (q, k, v))
        h = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        h = h.transpose(1, 2)
        if self.context is not None:
            h = own_sequence(h, self.context)
        return self.out(h.reshape(batch, length, -1))


class Exchange(torch.autograd.Function):
    """Send the i-th part of dimension 0 to the i-th rank, and return what all ranks sent."""

    @staticmethod
    def forward(ctx, sent, group):
        ctx.group = group
        return exchanged(sent, group)

    @staticmethod
    def backward(ctx, gradient):
        return exchanged(gradient, ctx.group), None


def exchanged(sent, group):
    sent = sent.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


exchange = Exchange.apply


def whole_sequence(x, group):
    """From [batch, part of the sequence, heads, d] to [batch, sequence, part of the heads, d]."""
    size, (batch, length, heads, width) = group.size(), x.shape
    sent = x.view(batch, length, size, heads // size, width).permute(2, 0, 1, 3, 4).contiguous()
    received = exchange(sent, group)
    return received.transpose(0, 1).reshape(batch, size * length, heads // size, width)


def own_sequence(x, group):
    """The inverse of `whole_sequence`."""
    size, (batch, length, heads, width) = group.size(), x.shape
    sent = x.reshape(batch, size, length // size, heads, width).transpose(0, 1).contiguous()
    received = exchange(sent, group)
    return received.permute(1, 2, 0, 3, 4).reshape(batch, length // size, size * heads, width)


class Block(nn.Module):
    def __init__(self, context=None):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(WIDTH, eps=1e-5), Attention(context)
        self.norm2 = nn.RMSNorm(WIDTH, eps=1e-5)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=True)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Takes tokens and the tokens that follow; returns the mean loss over them."""

    def __init__(self, *, tied=False, context=None, num_blocks=2, scaled=False, adapted=False):
        """`scaled`: logits are scaled by a 0-D parameter. `adapted`: all is frozen but adapters."""
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(context) for _ in range(num_blocks))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.5)) if scaled else None
        if adapted:
            self.requires_grad_(False)
            for block in self.blocks:
                block.attention.q, block.attention.v = LoraLinear(block.attention.q), LoraLinear(block.attention.v)

    def forward(self, tokens, following):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if self.scale is not None:
            logits = logits * self.scale.exp()
        return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


def decoder(**kwargs):
    """The same weights on every call."""
    torch.manual_seed(0)
    return Decoder(**kwargs)


def samples(index, count=2):
    """Tokens and the tokens that follow, [count, LENGTH] each, of one data rank and micro-batch."""
    tokens = torch.randint(VOCAB, (count, LENGTH + 1), generator=torch.Generator().manual_seed(1000 + index))
    return tokens[:, :-1], tokens[:, 1:]


def part_of(samples, rank, size):
    """The part of the sequences that one rank of a context axis gets."""
    return tuple(each.chunk(size, dim=1)[rank].contiguous() for each in samples)


def tensor_parallel(model, mesh, *, tied=False, sequence=False):
    """Parallelize a Decoder over a tensor axis, as torch's tutorial does.

    `sequence`: norms run on parts of the sequence.
    """
    if sequence:
        rows = {"output_layouts": Shard(1)}
        norm, columns = SequenceParallel(), {"input_layouts": Shard(1)}
    else:
        rows, norm, columns = {}, None, {}
    plan = {}
    for index in range(len(model.blocks)):
        for name in ("attention.q", "attention.k", "attention.v", "gate", "up"):
            adapted = isinstance(model.get_submodule(f"blocks.{index}.{name}"), LoraLinear)
            for part in (".base", ".lora_b") if adapted else ("",):
                plan[f"blocks.{index}.{name}{part}"] = ColwiseParallel(**columns)
        for name in ("attention.out", "down"):
            plan[f"blocks.{index}.{name}"] = RowwiseParallel(**rows)
        if norm is not None:
            plan |= {f"blocks.{index}.{name}": norm for name in ("norm1", "norm2")}
    plan["embed"] = RowwiseParallel(input_layouts=Replicate(), **rows)
    plan["head"] = ColwiseParallel(output_layouts=Replicate(), **columns)
    weight = nn.Parameter(distribute_tensor(model.embed.weight.detach(), mesh, [Shard(0)])) if tied else None
    if norm is not None:
        plan["norm"] = norm
    parallelize_module(model, mesh, plan)
    if tied:
        model.embed.weight = model.head.weight = weight
    return model


class TokenBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class TokenLayers(nn.Module):
    """Layers that see one token at a time: takes tokens of NUM_TOKENS, returns their part of the mean loss.

    `scale` has a loss of its own, which does not depend on tokens.
    """

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(TokenBlock() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float().square().sum() / NUM_TOKENS + self.scale.float().pow(2).sum() / WIDTH


def token_layers():
    """The same weights on every call."""
    torch.manual_seed(0)
    return TokenLayers()


def tokens_of(index, rank, size):
    """The tokens of one rank of a tensor axis, of one data rank and micro-batch."""
    tokens = torch.randn(NUM_TOKENS, WIDTH, generator=torch.Generator().manual_seed(1000 + index))
    return tokens.chunk(size)[rank]


def on_own_tokens(model, mesh):
    """Let each rank of a tensor axis run TokenLayers on its own tokens. Only the gradient of `scale` is not partial."""
    style = SequenceParallel(sequence_dim=0, use_local_output=True)
    leaves = [fqn for fqn, module in model.named_modules() if isinstance(module, nn.LayerNorm | nn.Linear)]
    return parallelize_module(model, mesh, dict.fromkeys(leaves, style))


class Experts(nn.Module):
    """Experts of two matrices each, and tokens that are sent to the ranks that hold their expert.

    Without `group`, all experts are here. Expert number = token number modulo the experts, so that each rank gets
    equally many tokens.
    """

    def __init__(self, num_experts=4, group=None):
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, WIDTH, 2 * WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(num_experts, 2 * WIDTH, WIDTH) * 0.1)
        self.num_experts, self.group = num_experts, group

    def forward(self, x):
        shape = x.shape
        tokens = x.reshape(-1, self.num_experts, WIDTH).transpose(0, 1).contiguous()  # [experts, tokens, WIDTH]
        up, down = (local(each) for each in (self.up, self.down))
        if self.group is not None:
            size = self.group.size()
            tokens = exchange(tokens, self.group)
            # [source rank, own experts, tokens, WIDTH] -> [own experts, tokens of all, WIDTH]
            tokens = tokens.view(size, self.num_experts // size, -1, WIDTH).transpose(0, 1).flatten(1, 2)
        out = torch.bmm(F.silu(torch.bmm(tokens, up)), down)
        if self.group is not None:
            out = out.view(self.num_experts // size, size, -1, WIDTH).transpose(0, 1).contiguous().flatten(0, 1)
            out = exchange(out, self.group)
        return out.transpose(0, 1).reshape(shape)


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class MoeBlock(Block):
    def __init__(self, group=None):
        super().__init__()
        self.norm3, self.experts = nn.RMSNorm(WIDTH, eps=1e-5), Experts(group=group)

    def forward(self, x):
        x = super().forward(x)
        return x + self.experts(self.norm3(x))


def moe_decoder(group=None):
    """A Decoder with experts: the same weights on every call. All experts are whole."""
    torch.manual_seed(0)
    model = Decoder(num_blocks=0)
    model.blocks.extend(MoeBlock(group) for _ in range(2))
    return model


def expert_parallel(model, mesh):
    """Distribute the experts over an axis."""
    for block in model.blocks:
        for name in ("up", "down"):
            whole = getattr(block.experts, name).detach()
            setattr(block.experts, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
    return model


def group_of(mesh):
    """The process group of an axis; None if it has one rank."""
    return mesh.get_group() if mesh.size() > 1 and dist.get_world_size() > 1 else None


class HfDecoder(nn.Module):
    """A LLaMA, or with `experts` a Mixtral, of transformers: the mean loss over the tokens that follow."""

    def __init__(self, *, tied=False, experts=False):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

        sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "vocab_size": VOCAB, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": 2, "tie_word_embeddings": tied}
        if experts:
            self.lm = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))
        else:
            self.lm = LlamaForCausalLM(LlamaConfig(**sizes))

    def forward(self, tokens, following):
        logits = self.lm(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def hf_decoder(**kwargs):
    """The same weights on every call."""
    torch.manual_seed(0)
    return HfDecoder(**kwargs)


def hf_tensor_parallel(model, mesh):
    """Apply transformers' own tensor plan of the model. As in `from_pretrained`, weights are tied after that."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model.lm.lm_head.weight = nn.Parameter(model.lm.lm_head.weight.detach().clone())
    plan, *_ = model.lm._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size(), tp_plan="auto"))
    apply_tensor_parallelism(model.lm, mesh, plan)
    model.lm.tie_weights()
    return model


def hf_expert_parallel(model, mesh):
    """Apply transformers' own expert plan of the model over the axis "ep" of a mesh with an axis "tp" of one rank."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    _, plan, _ = model.lm._resolve_parallel_plans(DistributedConfig(ep_size=mesh["ep"].size(), fsdp_size=mesh.size()))
    apply_expert_parallelism(model.lm, mesh["ep"], mesh["tp"], plan)
    return model

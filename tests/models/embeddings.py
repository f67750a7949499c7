"""Small language models that use their embedding and head in the ways that people do. Plain torch."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

NUM_CHUNKS = 3


class Body(nn.Module):
    """An embedding, three residual blocks and a norm; subclasses make a loss of it."""

    def __init__(self, vocab, width, embedding=nn.Embedding):
        super().__init__()
        self.embed = embedding(vocab, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def look_up(self, tokens):
        return self.embed(tokens)

    def hidden(self, tokens):
        x = self.look_up(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)

    def forward(self, tokens):
        return self.loss(self.hidden(tokens), tokens)


def cross_entropy(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(), reduction="sum") / 24


class WithHead(Body):
    def __init__(self, vocab, width, embedding=nn.Embedding):
        super().__init__(vocab, width, embedding)
        self.head = nn.Linear(width, vocab)

    def loss(self, x, tokens):
        return cross_entropy(self.head(x), tokens)


class ChunkedCalls(WithHead):
    """Calls its head once per chunk of the sequence."""

    def loss(self, x, tokens):
        chunks = zip(x.chunk(NUM_CHUNKS, 1), tokens.chunk(NUM_CHUNKS, 1), strict=True)
        return sum(self.chunk_loss(x, tokens) for x, tokens in chunks)

    def chunk_loss(self, x, tokens):
        return cross_entropy(self.head(x), tokens)


class CheckpointedChunks(ChunkedCalls):
    """Computes the logits of each chunk again in the backward."""

    def chunk_loss(self, x, tokens):
        return checkpoint(super().chunk_loss, x, tokens, use_reentrant=False)


class ChunkedReads(ChunkedCalls):
    """Multiplies by its head's weight, in a method: no source of a forward shows it."""

    def chunk_loss(self, x, tokens):
        return cross_entropy(F.linear(x, self.head.weight, self.head.bias), tokens)


class ReadsInForward(WithHead):
    """Multiplies by its head's weight in its forward."""

    def forward(self, tokens):
        x = self.hidden(tokens)
        return cross_entropy(F.linear(x, self.head.weight, self.head.bias), tokens)


class FunctionalTie(Body):
    """Multiplies by its embedding's weight, in a method."""

    def loss(self, x, tokens):
        return cross_entropy(F.linear(x, self.embed.weight), tokens)


class GatheredWeight(WithHead):
    """All-gathers the weight of its head if it is sharded, as TRL's loss does."""

    def loss(self, x, tokens):
        weight = self.head.weight
        return cross_entropy(F.linear(x, weight.full_tensor() if isinstance(weight, DTensor) else weight), tokens)


class InferenceReads(WithHead):
    """Reads its head's weight in inference mode, before it calls its head."""

    def loss(self, x, tokens):
        with torch.inference_mode():
            num_classes = self.head.weight.shape[0]
        return super().loss(x / num_classes**0.5, tokens)


class CheckpointedLookup(WithHead):
    """Looks up again in the backward: the output of the region is the embedding's."""

    def look_up(self, tokens):
        return checkpoint(self.embed, tokens, use_reentrant=False)


class CheckpointedScaledLookup(WithHead):
    """Looks up again in the backward, in a region with other ops."""

    def look_up(self, tokens):
        return checkpoint(lambda tokens: (self.embed(tokens) * 2).tanh(), tokens, use_reentrant=False)


class FirstRows(nn.Embedding):
    """A learned position table: returns a slice of its weight, whatever the tokens are."""

    def forward(self, tokens):
        return self.weight[: tokens.shape[1]]


class Scaled(nn.Embedding):
    """As Gemma's."""

    def forward(self, tokens):
        return super().forward(tokens) * 0.5


class TimesWeight(nn.Embedding):
    """Its backward reads the table."""

    def forward(self, tokens):
        return super().forward(tokens) * self.weight[:1]


class Biased(nn.Embedding):
    """Two parameters, which may be in groups of different dtypes."""

    def __init__(self, vocab, width):
        super().__init__(vocab, width)
        self.bias = nn.Parameter(torch.ones(width))

    def forward(self, tokens):
        return super().forward(tokens) + self.bias


class Positions(WithHead):
    def __init__(self, vocab, width):
        super().__init__(vocab, width)
        self.positions = FirstRows(vocab, width)

    def look_up(self, tokens):
        return self.embed(tokens) + self.positions(tokens)


EMBEDDING_MODELS = {
    "chunked_calls": ChunkedCalls,
    "checkpointed_chunks": CheckpointedChunks,
    "chunked_reads": ChunkedReads,
    "reads_in_forward": ReadsInForward,
    "functional_tie": FunctionalTie,
    "gathered_weight": GatheredWeight,
    "inference_reads": InferenceReads,
    "checkpointed_lookup": CheckpointedLookup,
    "checkpointed_scaled_lookup": CheckpointedScaledLookup,
    "positions": Positions,
    "scaled": lambda vocab, width: WithHead(vocab, width, Scaled),
    "biased": lambda vocab, width: WithHead(vocab, width, Biased),
    "times_weight": lambda vocab, width: WithHead(vocab, width, TimesWeight),
}

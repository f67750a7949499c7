"""A decoder of blocks, whole and as parts of a pipeline: a part is the model without the layers of other stages."""

import torch
from torch import nn

VOCAB, WIDTH, NUM_BLOCKS, LENGTH = 48, 16, 4, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleDict({str(index): Block() for index in range(NUM_BLOCKS)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def decoder(*, tied=False):
    """The whole model, with the same weights on all ranks."""
    torch.manual_seed(0)
    model = Decoder()
    if tied:
        model.head.weight = model.embed.weight
    return model


def part(index, num_parts, *, tied=False):
    """Part number `index` of the model. Tied weights become two copies."""
    model = decoder(tied=tied)
    if tied:
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    for block in range(NUM_BLOCKS):
        if block * num_parts // NUM_BLOCKS != index:
            del model.blocks[str(block)]
    if index > 0:
        model.embed = None
    if index < num_parts - 1:
        model.norm = model.head = None
    return model


def samples(step, data_rank, num_samples):
    """Tokens and targets of one data rank in one optimizer step: (num_samples, LENGTH) each."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    return torch.randint(VOCAB, (2, num_samples, LENGTH), generator=generator).unbind()


def loss_of(output, target):
    return nn.functional.cross_entropy(output.float().flatten(0, 1), target.flatten())

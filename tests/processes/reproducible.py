"""What every rank runs in the tests of reproducible runs: a number of micro-batches per step, whatever the ranks."""

import dataclasses
import math
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import zeroamp
from tests.models import adapters
from tests.models.small import VOCAB, WIDTH, Block, RMSNorm, batch, build, loss_of
from tests.processes.training import full_parameters
from zeroamp.reproducible.seeds import seed_of

SEED = 5


class DropoutLlama(nn.Module):
    """A decoder that draws random numbers: dropout, and noise from the global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.dropout = nn.Dropout(0.2)
        self.norm = RMSNorm(WIDTH)
        self.temperature = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embed(tokens))
        x = x + torch.randn(x.shape, dtype=x.dtype) * 0.01
        for block in self.blocks:
            x = self.dropout(block(x))
        logits = self.head(self.norm(x)).float() * self.temperature
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class ChosenLinear(nn.Module):
    """Layers of which a micro-batch runs one, chosen by its first token."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, first: int) -> torch.Tensor:
        return x + self.layers[first % 4](x)


class Chosen(nn.Module):
    """A decoder whose blocks leave most of their parameters unused in each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(ChosenLinear() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, int(tokens[0, 0]))
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


LORA = adapters.Adapted(lora={"lora_dropout": 0.1})
BUILDERS = {
    "dropout": DropoutLlama,
    "chosen": Chosen,
    "lora": LORA.build,
    **{name: partial(build, name) for name in ("llama_untied", "moe", "conv", "recurrent")},
}


@adapters.quietly
def build_model(name):
    """The model, the same in every process."""
    torch.manual_seed(0)
    return BUILDERS[name]()


def inputs_of(name, step, index, num_micro_batches):
    """The inputs of a micro-batch."""
    place = step * num_micro_batches + index
    return (
        adapters.batch(place)
        if name == "lora"
        else batch("llama_tied" if name in ("dropout", "chosen") else name, place)
    )


@adapters.quietly
def loss(name, model, inputs):
    """The loss of a micro-batch."""
    return model(input_ids=inputs, labels=inputs).loss if name == "lora" else loss_of(model, inputs)


def adamw(model):
    """The optimizer of all these tests."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reproduced:
    """What does not depend on the number of ranks."""

    losses: list[float]
    norms: list[float]
    scales: list[float]
    parameters: dict[str, torch.Tensor]


@adapters.quietly
def run(name, cfg, *, num_micro_batches, num_steps, overflow_at=None):
    """Train on this rank with its share of the micro-batches; return the `Reproduced`."""
    cfg = {**cfg, "gradient_accumulation_steps": num_micro_batches // dist.get_world_size()}
    policy = zeroamp.policy_from_config(cfg)
    wrap = {"Sequential"} if name == "conv" else None
    model = zeroamp.wrap_model(build_model(name), policy, auto_wrap_policy=wrap)
    model.train()
    train = zeroamp.TrainStep(model, adamw(model))
    torch.manual_seed(100 + dist.get_rank())  # the loop's generators differ between ranks
    losses, norms, scales = [], [], []
    for step in range(num_steps):
        report = None
        while report is None:
            index = zeroamp.micro_batch_index(train)
            value = loss(name, model, inputs_of(name, step, index, num_micro_batches))
            if overflow_at == (step, index):
                value = value * math.inf
            train.backward(value)
            torch.rand(3)
            report = train.step()
        losses.append(report.loss)
        norms.append(report.grad_norm)
        scales.append(report.loss_scale)
    return Reproduced(losses=losses, norms=norms, scales=scales, parameters=full_parameters(model))


def seeds(step, index):
    """The seed of a micro-batch, as the oracle needs it."""
    return seed_of(SEED, step, index)
